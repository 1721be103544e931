"""Whether the optimizer trains under this engine as it does alone, and with this release of torch."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.config import FSDP1, XLA, DeepSpeed
from prepkit.config.optimizer import OPTIMIZERS
from prepkit.config.precision import PRECISIONS
from prepkit.resolve.deepspeed.data import stage
from prepkit.resolve.optimizer_table import FAILS, MEASURED, RAISES, places
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule

SHAPED = frozenset({"Adafactor", "LAMB", "Lamb", "LARS", "Lars", "Muon", "SOAP", "Shampoo"})
"""Optimizers that compute from the shape or the norm of each whole parameter."""


def classes(resolved: Resolved) -> Iterator[tuple[str, str, str]]:
    """Place, library and class of every optimizer that is given or asked for."""
    given = resolved.facts.optimizer
    for index, member in enumerate(given.classes if given else ()):
        where = f"optimizer[{index}]" if given and given.members else "optimizer"
        yield where, member.module.partition(".")[0], member.name
    for made in resolved.created_optimizers:
        yield made.where, "torch", type(made.spec).__name__


def _under_engine(resolved: Resolved) -> Iterator[Hit]:
    flat = isinstance(resolved.cfg.engine, FSDP1)
    for where, library, name in classes(resolved) if resolved.trains else ():
        if flat and name in SHAPED:
            continue  # has a rule of its own, which knows where parameters stay whole
        known = FAILS.get(f"{library}.{name}", {})
        bad = [place for place in places(resolved.cfg) if place in known]
        if not bad and name in SHAPED and library not in ("torch", "deepspeed") and _flattens(resolved):
            what = f"`{name}` of {library} computes from each parameter's shape or norm, and ZeRO gives it parts of all"
            yield Hit(where, f"{what} parameters end to end.")
        for place in bad[:1]:
            how = "raises at its first step" if known[place] == RAISES else "trains otherwise than it does alone"
            good = [other for other in MEASURED if other not in known and "," not in other]
            what = f"`{name}` of {library} {how} under {place}; it trains as alone under {' and '.join(good)}."
            yield Hit(where, what)


def _flattens(resolved: Resolved) -> bool:
    engine = resolved.cfg.engine
    return isinstance(engine, DeepSpeed) and stage(engine) > 0


def _newer_torch(resolved: Resolved) -> Iterator[Hit]:
    for made in resolved.created_optimizers:
        since, env = OPTIMIZERS[type(made.spec)].since, resolved.facts.env
        if env.release < since:
            name = type(made.spec).__name__
            yield Hit(made.where, f"torch has {name} since {since[0]}.{since[1]}, and torch {env.torch} runs.")


def _closure(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    for where, _, name in classes(resolved):
        if name != "LBFGS":
            continue
        if isinstance(cfg.engine, DeepSpeed | XLA):
            yield Hit(where, f"`LBFGS` steps with a closure, which {type(cfg.engine).__name__} does not pass on.")
        elif (steps := resolved.accumulation) > 1:
            yield Hit(where, f"`LBFGS` makes its gradients anew within a step, and accumulation={steps}.")
        elif PRECISIONS[type(cfg.precision)].scales_loss:
            yield Hit(where, "`LBFGS` makes its gradients anew within a step, and float16 scales the loss.")
        elif where.endswith("]"):  # one of several
            yield Hit(where, "`LBFGS` makes its gradients anew within a step, and is given beside another optimizer.")


RULES: tuple[Rule, ...] = (
    Rule(
        id="optimizer.under-engine",
        summary="The optimizer trains under this engine as it does alone, as far as that was tried.",
        check=_under_engine,
        fix="Use torch.optim.AdamW, or write engine=DDP().",
        source=("tests/tools/optimizers.py", "pain 13"),
    ),
    Rule(
        id="optimizer.closure",
        summary="An optimizer that steps with a closure makes all gradients of a step by itself.",
        check=_closure,
        fix="Write accumulation=1 and a precision without a loss scale, with engine=DDP() or Single(), or use AdamW.",
        overridable=False,
        source=("torch.optim.LBFGS.step",),
    ),
    Rule(
        id="optimizer.newer-torch",
        summary="torch has the optimizer that is asked for.",
        check=_newer_torch,
        fix="Write `pip install -U torch`, or optimizer=AdamW(...).",
        overridable=False,
        source=("torch.optim",),
    ),
)
"""Reporting order: the engine, the step, the release."""
