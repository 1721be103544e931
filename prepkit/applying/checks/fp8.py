"""What the float8 steps leave behind. Looks at classes by name, so that no optional library is imported."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.objects.forward import FP8_MARK, FP8Forward
from prepkit.objects.state import LiveModel
from prepkit.plan.attestation import Check, each
from prepkit.steps import (
    AutocastFP8Forward,
    ConvertFP8Linears,
    ConvertTransformerEngine,
    InitializeMSAMP,
    PrecomputeFloat8Scales,
)


def converted(step: ConvertFP8Linears, live: LiveModel) -> Iterator[Check]:
    """Every planned layer is torchao's, with the planned way to multiply and to be gathered."""
    yield each("ConvertFP8Linears", "layers compute in float8", _not_of(live, step.paths, "torchao.float8"))
    wrong = []
    for path in step.paths:
        config = getattr(_inner(live, path), "config", None)
        found = (getattr(config, "emulate", None), getattr(config, "enable_fsdp_float8_all_gather", None))
        if config is not None and found != (step.emulate, step.all_gather):
            wrong.append(f"{path} has emulate, all_gather {found}, planned {(step.emulate, step.all_gather)}")
    yield each("ConvertFP8Linears", "layers are configured as planned", wrong)


def engine(step: ConvertTransformerEngine, live: LiveModel) -> Iterator[Check]:
    """Every planned layer is TransformerEngine's."""
    yield each(
        "ConvertTransformerEngine",
        "layers are TransformerEngine's",
        _not_of(live, (*step.linears, *step.norms), "transformer_engine"),
    )


def autocast(step: AutocastFP8Forward, live: LiveModel) -> Iterator[Check]:
    """The forward stands where it was put: in the wrapper where there is one."""
    outer = (live.target.model, *live.modules[""])
    (found, *_) = (*(vars(module).get("forward") for module in outer if FP8_MARK in vars(module)), None)
    bad = []
    if not isinstance(found, FP8Forward):
        bad = [f"{type(live.target.model).__name__} has its own forward"]
    elif (type(found.recipe).__name__, found.during_eval) != (step.recipe, step.during_eval):
        bad = [f"found {type(found.recipe).__name__}, {'always' if found.during_eval else 'while the model trains'}"]
    yield each("AutocastFP8Forward", "float8 autocast", bad)


def msamp(step: InitializeMSAMP, live: LiveModel) -> Iterator[Check]:
    """Every Linear and the optimizer are MS-AMP's."""
    yield each("InitializeMSAMP", "layers are MS-AMP's", _not_of(live, step.linears, "msamp"))
    optimizer = type(live.target.optimizer)
    own = optimizer.__module__.startswith("msamp")
    yield each("InitializeMSAMP", "the optimizer is MS-AMP's", [] if own else [f"it is {optimizer.__name__}"])


def scales(step: PrecomputeFloat8Scales, live: LiveModel) -> Iterator[Check]:
    """Something watches the optimizer."""
    del step
    hooks = getattr(live.target.optimizer, "_optimizer_step_post_hooks", None)
    yield each(
        "PrecomputeFloat8Scales",
        "scales are computed after each step",
        [] if hooks else ["the optimizer has no post-step hook"],
    )


def _inner(live: LiveModel, path: str) -> object:
    found = live.at(path)
    return found[-1] if found else None


def _not_of(live: LiveModel, paths: tuple[str, ...], package: str) -> list[str]:
    """Paths at which no class of the package stands, also among the bases: ``fully_shard`` makes a class of its own."""
    return [
        f"{path} is {type(_inner(live, path)).__name__}"
        for path in paths
        if not any(base.__module__.startswith(package) for base in type(_inner(live, path)).__mro__)
    ]
