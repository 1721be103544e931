"""What the float8 and XLA steps leave behind. Looks at classes by name, so that no optional library is imported."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.live.model.forward_fp8 import MARK, FP8Forward
from prepkit.live.model.state import LiveModel
from prepkit.steps import (
    AutocastFP8Forward,
    ConvertFP8Linears,
    ConvertTransformerEngine,
    InitializeMSAMP,
    MoveToXLA,
    PrecomputeFloat8Scales,
    ReduceXLAGradients,
)

Look = tuple[str, list[str]]
"""What was looked at, and where it does not hold."""


def converted(step: ConvertFP8Linears, standing: LiveModel) -> Iterator[Look]:
    """Every planned layer is torchao's, with the planned way to multiply and to be gathered."""
    yield "layers compute in float8", _not_of(standing, step.paths, "torchao.float8")
    wrong = []
    for path in step.paths:
        config = getattr(_inner(standing, path), "config", None)
        found = (getattr(config, "emulate", None), getattr(config, "enable_fsdp_float8_all_gather", None))
        if config is not None and found != (step.emulate, step.all_gather):
            wrong.append(f"{path} has emulate, all_gather {found}, planned {(step.emulate, step.all_gather)}")
    yield "layers are configured as planned", wrong


def engine(step: ConvertTransformerEngine, standing: LiveModel) -> Iterator[Look]:
    """Every planned layer is TransformerEngine's."""
    yield "layers are TransformerEngine's", _not_of(standing, (*step.linears, *step.norms), "transformer_engine")


def autocast(step: AutocastFP8Forward, standing: LiveModel) -> Iterator[Look]:
    """The forward stands where it was put: in the wrapper where there is one."""
    outer = (standing.target.model, *standing.modules[""])
    (found, *_) = (*(vars(module).get("forward") for module in outer if MARK in vars(module)), None)
    bad = []
    if not isinstance(found, FP8Forward):
        bad = [f"{type(standing.target.model).__name__} has its own forward"]
    elif (type(found.recipe).__name__, found.during_eval) != (step.recipe, step.during_eval):
        bad = [f"found {type(found.recipe).__name__}, {'always' if found.during_eval else 'while the model trains'}"]
    yield "float8 autocast", bad


def msamp(step: InitializeMSAMP, standing: LiveModel) -> Iterator[Look]:
    """Every Linear and the optimizer are MS-AMP's."""
    yield "layers are MS-AMP's", _not_of(standing, step.linears, "msamp")
    optimizer = type(standing.target.optimizer)
    own = optimizer.__module__.startswith("msamp")
    yield "the optimizer is MS-AMP's", [] if own else [f"it is {optimizer.__name__}"]


def scales(step: PrecomputeFloat8Scales, standing: LiveModel) -> Iterator[Look]:
    """Something watches the optimizer."""
    del step
    hooks = getattr(standing.target.optimizer, "_optimizer_step_post_hooks", None)
    yield "scales are computed after each step", [] if hooks else ["the optimizer has no post-step hook"]


def on_xla(step: MoveToXLA, standing: LiveModel) -> Iterator[Look]:
    """Every tensor is on an XLA device."""
    del step
    tensors = {**standing.params, **standing.buffers}
    yield "everything is on xla", [f"{name} is on {t.device}" for name, t in tensors.items() if t.device.type != "xla"]


def reduced(step: ReduceXLAGradients, standing: LiveModel) -> Iterator[Look]:
    """Something watches the optimizer."""
    del step
    hooks = getattr(standing.target.optimizer, "_optimizer_step_pre_hooks", None)
    yield "gradients are averaged before each step", [] if hooks else ["the optimizer has no pre-step hook"]


def _inner(standing: LiveModel, path: str) -> object:
    found = standing.at(path)
    return found[-1] if found else None


def _not_of(standing: LiveModel, paths: tuple[str, ...], package: str) -> list[str]:
    """Paths at which no class of the package stands, also among the bases: ``fully_shard`` makes a class of its own."""
    return [
        f"{path} is {type(_inner(standing, path)).__name__}"
        for path in paths
        if not any(base.__module__.startswith(package) for base in type(_inner(standing, path)).__mro__)
    ]
