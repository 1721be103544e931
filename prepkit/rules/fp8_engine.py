"""Float8 against the engine and the optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from prepkit.config import (
    FSDP1,
    FSDP2,
    MSAMP,
    Config,
    DeepSpeed,
    Intent,
    NoClip,
    TorchAO,
    TransformerEngine,
)
from prepkit.facts import Facts
from prepkit.findings import Severity
from prepkit.findings.text import count
from prepkit.resolve.fp8 import has_engine_layers
from prepkit.resolve.resolved import Resolved
from prepkit.rules.fp8 import backend, bf16, changed
from prepkit.rules.rule import Hit, Rule

ADAMS = (("Adam", "torch.optim"), ("AdamW", "torch.optim"), ("FusedAdam", "deepspeed.ops"))
"""Classes, with the start of their modules, that ``msamp.initialize`` takes."""


def _without(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    asked = backend(cfg)
    if asked is not None and not resolved.engine_traits.fp8_backends:
        what = f"{type(asked).__name__} does not compute in float8 under {type(cfg.engine).__name__}."
        yield Hit("config.precision.backend", what)


def _gather(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    asked = backend(cfg)
    if not isinstance(asked, TorchAO) or not asked.float8_all_gather:
        return
    if not isinstance(cfg.engine, FSDP2):
        does = "gathers flat parameters" if isinstance(cfg.engine, FSDP1) else "gathers no weights"
        what = f"{type(cfg.engine).__name__} {does}, so that float8_all_gather=True has no use."
        yield Hit("config.precision.backend.float8_all_gather", what)
    elif asked.recipe != "tensorwise":
        what = f"Weights are gathered with one scale each, and {asked.recipe} wants one per row."
        yield Hit("config.precision.backend.float8_all_gather", what)


def _engine(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    if isinstance(backend(cfg), MSAMP) and MSAMP not in resolved.engine_traits.fp8_backends:
        engine = type(cfg.engine).__name__
        what = f"MSAMP trains under Single, DDP and DeepSpeed, and the engine is {engine}."
        yield Hit("config.precision.backend", what)


def _adam(resolved: Resolved) -> Iterator[Hit]:
    if not isinstance(backend(resolved.cfg), MSAMP) or _makes_its_own(resolved):
        return
    optimizer = resolved.facts.optimizer
    if optimizer is None:
        what = "MS-AMP replaces model and optimizer together, and none is given."
    elif not any(optimizer.name == name and optimizer.module.startswith(module) for name, module in ADAMS):
        what = f"MS-AMP takes Adam, AdamW and FusedAdam, and `{optimizer.name}` is given."
    elif optimizer.stateful:
        state = count(len(optimizer.stateful), "parameter")
        what = f"MS-AMP starts its optimizer anew, and the state of {state} would be lost."
    else:
        return
    yield Hit("optimizer", what)


def _makes_its_own(resolved: Resolved) -> bool:
    """Whether DeepSpeed will make the optimizer, over the parameters as they then are."""
    return isinstance(resolved.cfg.engine, DeepSpeed) and resolved.deepspeed.optimizer == "section"


def _clip(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    own = isinstance(cfg.engine, DeepSpeed)  # whose float8 optimizer clips by itself
    if isinstance(backend(cfg), MSAMP) and not isinstance(cfg.clip, NoClip) and not own:
        yield Hit("config.clip", "MS-AMP's float8 gradients are no tensors that torch could clip.")


def _follower(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    asked = backend(cfg)
    alone = resolved.facts.optimizer is None and not cfg.optimizer and cfg.intent is Intent.TRAINING
    alone = alone and not _makes_its_own(resolved)
    if isinstance(asked, TransformerEngine) and alone and not has_engine_layers(resolved.facts.model):
        what = "TransformerEngine's layers have parameters of their own: an optimizer that is not given keeps the old."
        yield Hit("optimizer", what)


def _deprecated(resolved: Resolved) -> Iterator[Hit]:
    if isinstance(backend(resolved.cfg), MSAMP):
        yield Hit("config.precision.backend", "MS-AMP is no longer developed, and accelerate has deprecated it.")


def _unclipped(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, clip=NoClip())


RULES: tuple[Rule, ...] = (
    Rule(
        id="fp8.engine",
        summary="The engine computes in float8.",
        check=_without,
        fix="Write precision=BF16(), or engine=FSDP2().",
        overridable=False,
        source=("ST-21", "ST-35"),
        repair=bf16,
    ),
    Rule(
        id="fp8.all-gather",
        summary="Weights are gathered in float8 under FSDP2 with the tensorwise recipe.",
        check=_gather,
        fix="Leave float8_all_gather out: it is on where it can be.",
        overridable=False,
        source=("X-4", "SS-27", "K-H6"),
        repair=changed(float8_all_gather=None),
    ),
    Rule(
        id="fp8.msamp-engine",
        summary="MS-AMP trains under Single, DDP and DeepSpeed.",
        check=_engine,
        fix="Write backend=TorchAO(), or engine=DDP().",
        overridable=False,
        source=("ST-26", "ST-31"),
        repair=bf16,
    ),
    Rule(
        id="fp8.msamp-optimizer",
        summary="MS-AMP is given an Adam that has not stepped yet.",
        check=_adam,
        fix="Pass a new torch.optim.AdamW over the model's parameters, and leave config.optimizer out.",
        overridable=False,
        source=("X-5",),
        repair=bf16,
    ),
    Rule(
        id="fp8.msamp-clip",
        summary="MS-AMP's gradients are not clipped.",
        check=_clip,
        fix="Write clip=NoClip().",
        source=("msamp.clip_grad_norm_", "pain 34"),
        repair=_unclipped,
    ),
    Rule(
        id="fp8.optimizer-missing",
        summary="TransformerEngine trains with an optimizer that is given or asked for.",
        check=_follower,
        fix="Pass the optimizer, or write optimizer=AdamW(...) in the config.",
        source=("X-3", "PR-15"),
        repair=bf16,
    ),
    Rule(
        id="fp8.msamp-deprecated",
        summary="The float8 library is one that is still developed.",
        check=_deprecated,
        fix="Write backend=TorchAO().",
        severity=Severity.WARNING,
        source=("SS-29",),
        repair=bf16,
    ),
)
"""Reporting order: the engine, the optimizer; then warnings."""
