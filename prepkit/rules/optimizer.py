"""Optimizers, given or asked for, and their scheduler: against the model, the engine and the release of torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from attrs import evolve, fields

from prepkit.config import FP8, MSAMP, Config, DeepSpeed, Intent
from prepkit.config.optimizer import OPTIMIZERS, SELECTS, Group, OptimizerSpec, options, specs
from prepkit.config.precision import PRECISIONS
from prepkit.facts import Facts, ParamFact
from prepkit.findings import Severity
from prepkit.findings.text import count, some
from prepkit.resolve.created_optimizers import named, takes
from prepkit.resolve.deepspeed.data import look, said, stage
from prepkit.resolve.engines import traits
from prepkit.resolve.optimizer_table import FAILS, MEASURED, RAISES, places
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Moment, Rule

# --- engines ---------------------------------------------------------------------------------------------------------


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
    flat = resolved.engine_traits.flattens
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


def _unfinished(resolved: Resolved) -> Iterator[Hit]:
    given = resolved.facts.optimizer
    for name in given.unfinished if given else ():
        what = f"`{name}` has not called super().__init__(), and torch's hooks before and after a step are missing."
        yield Hit("optimizer", what)


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
        if not resolved.engine_traits.takes_closures:
            yield Hit(where, f"`LBFGS` steps with a closure, which {type(cfg.engine).__name__} does not pass on.")
        elif (steps := resolved.accumulation) > 1:
            yield Hit(where, f"`LBFGS` makes its gradients anew within a step, and accumulation={steps}.")
        elif PRECISIONS[type(cfg.precision)].scales_loss:
            yield Hit(where, "`LBFGS` makes its gradients anew within a step, and float16 scales the loss.")
        elif where.endswith("]"):  # one of several
            yield Hit(where, "`LBFGS` makes its gradients anew within a step, and is given beside another optimizer.")


# --- optimizers that prepkit creates ---------------------------------------------------------------------------------


def _trained(resolved: Resolved) -> tuple[ParamFact, ...]:
    return tuple(param for param in resolved.facts.model.params if param.requires_grad)


def _places(resolved: Resolved) -> Iterator[tuple[str, OptimizerSpec | Group]]:
    """Every optimizer and every group of the config with its place."""
    for made in resolved.created_optimizers:
        yield made.where, made.spec
        yield from ((f"{made.where}.groups[{index}]", group) for index, group in enumerate(made.spec.groups))


def _unmatched(resolved: Resolved) -> Iterator[Hit]:
    names = [param.name for param in _trained(resolved)]
    for where, of in _places(resolved):
        for pattern in of.names:
            if not any(map(named((pattern,)), names)):
                yield Hit(f"{where}.names", f"`{pattern}` matches no trained parameter. There are {some(names)}.")
        if isinstance(of, Group) and not of.names:
            yield Hit(f"{where}.names", "A group without patterns has no parameters.")


def _trained_twice(resolved: Resolved) -> Iterator[Hit]:
    for made in resolved.created_optimizers:
        yield from _overlap(made.where, "groups", made.spec.groups, made.names)
    trained = _trained(resolved)
    claims: dict[str, list[int]] = defaultdict(list)
    for index, made in enumerate(resolved.created_optimizers):
        for name in takes(made.spec, trained) if made.spec.names else ():
            claims[name].append(index)
    twice = [name for name, at in claims.items() if len(at) > 1]
    if twice:
        at = " and ".join(f"config.optimizer[{index}]" for index in claims[twice[0]])
        yield Hit("config.optimizer", f"{at} both name {some(twice)}.")


def _overlap(where: str, field: str, groups: tuple[Group, ...], names: tuple[str, ...]) -> Iterator[Hit]:
    means = [named(group.names) for group in groups]
    for name in names:
        at = [index for index, own in enumerate(means) if own(name)]
        if len(at) > 1:
            also = sum(sum(own(other) for own in means) > 1 for other in names) - 1
            more = f" and {count(also, 'other parameter')} are" if also else " is"
            yield Hit(f"{where}.{field}", f"`{name}`{more} in groups {' and '.join(map(str, at))}.")
            return


def _nothing(resolved: Resolved) -> Iterator[Hit]:
    trained = _trained(resolved)
    for made in resolved.created_optimizers if trained else ():
        if not made.names:
            kind, only = type(made.spec).__name__, OPTIMIZERS[type(made.spec)].only_matrices
            why = "no matrix is left for it" if only else "the other optimizers step every trained parameter"
            if not any(takes(made.spec, trained)):
                why = "its patterns mean no matrix" if only else "its patterns mean no trained parameter"
            yield Hit(made.where, f"{kind} would have no parameters: {why}.")


def _unclaimed(resolved: Resolved) -> Iterator[Hit]:
    if not resolved.created_optimizers or not resolved.trains:
        return
    claimed = {name for made in resolved.created_optimizers for name in made.names}
    left = [param.name for param in _trained(resolved) if param.name not in claimed]
    if left:
        whole = [type(m.spec).__name__ for m in resolved.created_optimizers if OPTIMIZERS[type(m.spec)].only_matrices]
        why = f" {whole[0]} steps matrices only." if whole else ""
        what = (
            f"{count(len(left), 'trainable parameter')} in none of the optimizers, so never updated: {some(left)}.{why}"
        )
        yield Hit("config.optimizer", what)


def _foreign_option(resolved: Resolved) -> Iterator[Hit]:
    for made in resolved.created_optimizers:
        known = [field.name for field in fields(type(made.spec)) if field.name not in SELECTS]
        for index, group in enumerate(made.spec.groups):
            foreign = [name for name in options(group) if name not in known]
            if foreign:
                what = f"{type(made.spec).__name__} has no {', '.join(foreign)}: torch would not look at it."
                yield Hit(f"{made.where}.groups[{index}].{foreign[0]}", what)


def takes_one(cfg: Config) -> str:
    """Who takes a single optimizer only; empty where several are taken."""
    if traits(cfg).engine_steps:
        return "DeepSpeed"
    return "MS-AMP" if isinstance(cfg.precision, FP8) and isinstance(cfg.precision.backend, MSAMP) else ""


def _several(resolved: Resolved) -> Iterator[Hit]:
    given, who = resolved.facts.optimizer, takes_one(resolved.cfg)
    number = max(len(resolved.created_optimizers), len(given.classes) if given else 0)
    if who and number > 1:
        where = "optimizer" if given else "config.optimizer"
        yield Hit(where, f"{who} steps one optimizer, and there are {number}.")


def _held(facts: Facts) -> tuple[str, ...]:
    groups = facts.optimizer.groups if facts.optimizer else ()
    return tuple(name for group in groups for name in group.slots if name is not None)


def _foreign(resolved: Resolved) -> Iterator[Hit]:
    for index, group in enumerate(resolved.facts.optimizer.groups if resolved.facts.optimizer else ()):
        if foreign := group.slots.count(None):
            of = f"{foreign} of the {count(len(group.slots), 'tensor')} in group {index}"
            yield Hit(
                f"optimizer.groups[{index}]", f"{of} {'is' if foreign == 1 else 'are'} no parameter of the model."
            )


def _missing(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    if facts.optimizer is None or resolved.cfg.intent is not Intent.TRAINING:
        return
    names = set(_held(facts))
    missed = tuple(p.name for p in facts.model.params if p.requires_grad and p.name not in names)
    if missed:
        what = f"{count(len(missed), 'trainable parameter')} in no group, so never updated: {some(missed)}."
        yield Hit("optimizer", what)


def _twice(resolved: Resolved) -> Iterator[Hit]:
    again = tuple(name for name, times in Counter(_held(resolved.facts)).items() if times > 1)
    if again:
        yield Hit("optimizer", f"{some(again)} {'is' if len(again) == 1 else 'are'} held in more than one slot.")


def _frozen(resolved: Resolved) -> Iterator[Hit]:
    names = set(_held(resolved.facts))
    frozen = tuple(p.name for p in resolved.facts.model.params if not p.requires_grad and p.name in names)
    if frozen:
        yield Hit("optimizer", f"{count(len(frozen), 'frozen parameter')} in its groups: {some(frozen)}.")


def _two(resolved: Resolved) -> Iterator[Hit]:
    if resolved.facts.optimizer is not None and resolved.cfg.optimizer:
        given, asked = resolved.facts.optimizer.name, _asked(resolved.cfg)
        yield Hit("config.optimizer", f"{asked} is asked for, and an optimizer `{given}` is given as well.")


def _none(resolved: Resolved) -> Iterator[Hit]:
    cfg, facts = resolved.cfg, resolved.facts
    if cfg.intent is Intent.TRAINING and facts.optimizer is None and not cfg.optimizer and not _section(cfg):
        yield Hit("config.optimizer", "intent is training, but no optimizer is given or asked for.")


def _asked(cfg: Config) -> str:
    """The optimizers of the config in words."""
    return " + ".join(type(spec).__name__ for spec in specs(cfg.optimizer))


def _section(cfg: Config) -> bool:
    """Return whether DeepSpeed makes an optimizer from a section of its config."""
    return isinstance(cfg.engine, DeepSpeed) and look(said(cfg.engine), "optimizer") is not None


def _for_inference(resolved: Resolved) -> Iterator[Hit]:
    cfg, facts = resolved.cfg, resolved.facts
    if cfg.intent is Intent.INFERENCE and (facts.optimizer is not None or cfg.optimizer):
        name = facts.optimizer.name if facts.optimizer else _asked(cfg)
        yield Hit("config.intent", f"intent is inference, but there is an optimizer `{name}`.")


def _own_list(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    if resolved.engine_traits.replaces_params and facts.optimizer and facts.optimizer.keeps_own_list:
        what = f"`{facts.optimizer.name}` keeps a list of parameters of its own, which cannot follow them into shards."
        yield Hit("optimizer", what)


def _unshardable(resolved: Resolved) -> Iterator[Hit]:
    given = resolved.facts.optimizer
    for member in given.classes if resolved.engine_traits.makes_dtensors and given else ():
        if member.module.partition(".")[0] == "bitsandbytes":
            what = f"`bitsandbytes` `{member.name}` reads raw memory and cannot step sharded parameters."
            yield Hit("optimizer", what)


def _other_scheduler(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    if facts.scheduler and facts.optimizer and not facts.scheduler.drives_optimizer and not facts.scheduler.factory:
        yield Hit(
            "scheduler", f"`{facts.scheduler.name}` drives another optimizer than the `{facts.optimizer.name}` given."
        )


def _lone_scheduler(resolved: Resolved) -> Iterator[Hit]:
    cfg, facts = resolved.cfg, resolved.facts
    if facts.scheduler and not facts.optimizer:
        if facts.scheduler.factory and (cfg.optimizer or _section(cfg)):
            return  # it is called once the optimizer exists
        asked = f"; the {_asked(cfg)} asked for does not exist yet" if cfg.optimizer else ""
        yield Hit("scheduler", f"`{facts.scheduler.name}` is given without its optimizer{asked}.")


def _drop_spec(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, optimizer=None)


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
        fix="Write accumulation=1 and a precision without a loss scale, under DDP or Single; or use AdamW.",
        overridable=False,
        source=("torch.optim.LBFGS.step",),
    ),
    Rule(
        id="optimizer.newer-torch",
        summary="torch has the optimizer that is asked for.",
        check=_newer_torch,
        fix="Write `pip install -U torch`, or optimizer=AdamW(...).",
        at=(Moment.PLAN, Moment.ACT),
        overridable=False,
        source=("torch.optim",),
    ),
    Rule(
        id="optimizer.several",
        summary="There are several optimizers only where the engine steps several.",
        check=_several,
        fix="Give one, with groups of its own options, or write engine=FSDP2() or engine=DDP().",
        overridable=False,
        source=("deepspeed.initialize", "pain 13"),
    ),
    Rule(
        id="optimizer.pattern",
        summary="Every pattern of an optimizer and of a group matches a trained parameter.",
        check=_unmatched,
        fix="Write a pattern of parameter names in which * stands for any characters, dots too, such as *.bias.",
        severity=Severity.WARNING,
        source=("pain 13",),
    ),
    Rule(
        id="optimizer.matched-twice",
        summary="No parameter is in two groups, or named by two optimizers.",
        check=_trained_twice,
        fix="Make the patterns narrower, so that each parameter is matched once.",
        source=("G-5", "G-57"),
    ),
    Rule(
        id="optimizer.empty",
        summary="Every optimizer that is asked for has parameters.",
        check=_nothing,
        fix="Leave it out, or write names=(...) that mean trained parameters.",
        overridable=False,
        source=("torch.optim.Optimizer.__init__",),
    ),
    Rule(
        id="optimizer.unclaimed",
        summary="Every trainable parameter is stepped by one of the optimizers that are asked for.",
        check=_unclaimed,
        fix="Add an optimizer without names, such as AdamW(), which takes what is left, or freeze the parameters.",
        source=("pain 1",),
    ),
    Rule(
        id="optimizer.group-option",
        summary="Groups set options that their optimizer has.",
        check=_foreign_option,
        fix="Remove it, or write it for an optimizer that has it.",
        overridable=False,
        source=("torch.optim.Optimizer.add_param_group",),
    ),
    Rule(
        id="optimizer.foreign-parameters",
        summary="Every tensor of the optimizer is a parameter of the model.",
        check=_foreign,
        fix="Build the optimizer from model.parameters() after the last change to it (adapters, dtype, size).",
        at=(Moment.PLAN, Moment.ACT),
        source=("pain 1", "G-1", "P2-14"),
    ),
    Rule(
        id="optimizer.held-twice",
        summary="No parameter is in two slots.",
        check=_twice,
        fix="Put every parameter into one group once.",
        source=("G-5", "G-57"),
    ),
    Rule(
        id="optimizer.two",
        summary="The optimizer is given or asked for, not both.",
        check=_two,
        fix="Leave config.optimizer out, or do not pass an optimizer.",
        at=(Moment.PLAN, Moment.ACT),
        overridable=False,
        source=("pain 3",),
        repair=_drop_spec,
    ),
    Rule(
        id="optimizer.for-inference",
        summary="Inference comes without an optimizer.",
        check=_for_inference,
        fix="Write intent=Intent.TRAINING, or leave the optimizer out.",
        source=("pain 19", "PR-7"),
    ),
    Rule(
        id="optimizer.keeps-own-list",
        summary="What is sharded or cut is held by the optimizer in its groups and state only.",
        check=_own_list,
        fix="Leave it out and write optimizer=AdamW(...) in the config, or engine=DDP().",
        source=("pain 13", "P2-13"),
    ),
    Rule(
        id="optimizer.cannot-shard",
        summary="Under FSDP2 and TensorParallel the optimizer can step sharded parameters.",
        check=_unshardable,
        fix="Use torch.optim.AdamW or an 8-bit optimizer of torchao, or write engine=DDP().",
        source=("pain 13",),
    ),
    Rule(
        id="optimizer.unfinished",
        summary="An optimizer has run the __init__ of torch.optim.Optimizer.",
        check=_unfinished,
        fix=(
            "Write super().__init__(params, defaults) in its __init__; or give build_plan the optimizer inside it, and "
            "do what it does beside after `if ready.step():`."
        ),
        overridable=False,
        stops="torch registers hooks in what that __init__ makes",
        source=("torch.optim.Optimizer.register_step_pre_hook",),
    ),
    Rule(
        id="scheduler.other-optimizer",
        summary="The scheduler drives the optimizer that is given.",
        check=_other_scheduler,
        fix="Build the scheduler from the optimizer that you pass.",
        source=("W-11", "G-39"),
    ),
    Rule(
        id="scheduler.without-optimizer",
        summary="A scheduler comes with its optimizer.",
        check=_lone_scheduler,
        fix="Pass the optimizer that the scheduler was built from, and leave config.optimizer out.",
        source=("G-39",),
    ),
    Rule(
        id="optimizer.none",
        summary="Training comes with an optimizer.",
        check=_none,
        fix="Pass an optimizer or write optimizer=AdamW(...); write intent=Intent.INFERENCE if nothing is trained.",
        severity=Severity.WARNING,
        source=("PR-7", "PR-21"),
    ),
    Rule(
        id="optimizer.misses-parameters",
        summary="Every trainable parameter is in the optimizer.",
        check=_missing,
        fix="Add them to a group, or freeze them with requires_grad_(False).",
        severity=Severity.WARNING,
        source=("pain 1",),
    ),
    Rule(
        id="optimizer.frozen-parameters",
        summary="Every parameter in the optimizer is trainable.",
        check=_frozen,
        fix="Build the groups from parameters with requires_grad only.",
        severity=Severity.WARNING,
        source=("pain 19",),
    ),
)
