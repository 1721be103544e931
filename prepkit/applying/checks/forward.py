"""What a block does besides its own forward: recomputed in backward, compiled, in float8. As planned, or not.

Looks at classes of optional libraries by name, so that none is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.nn import Module
from torch.utils.checkpoint import checkpoint

from prepkit.facts.run import Departure, each
from prepkit.objects.forward import FP8_MARK, FP8Forward
from prepkit.objects.names import known_bases
from prepkit.objects.state import LiveModel
from prepkit.steps import (
    AutocastFP8Forward,
    CheckpointModules,
    CompileModules,
    ConvertFP8Linears,
    ConvertTransformerEngine,
    InitializeMSAMP,
    PrecomputeFloat8Scales,
)


def checkpointed(step: CheckpointModules, live: LiveModel) -> Iterator[Departure]:
    """A checkpoint wrapper stands at every planned path, and recomputes, keeps and moves what was planned."""
    wrappers = {path: [m for m in live.at(path) if isinstance(m, CheckpointWrapper)] for path in step.paths}
    yield from each("CheckpointModules", "wrapped", [path for path, found in wrappers.items() if not found])
    texts = [f"{path} {text}" for path, found in wrappers.items() for one in found for text in _differs(step, one)]
    yield from each("CheckpointModules", "what is recomputed, kept and offloaded", texts)


def _differs(step: CheckpointModules, wrapper: CheckpointWrapper) -> Iterator[str]:
    given: Any = wrapper.checkpoint_fn
    said = given.keywords
    if said.get("preserve_rng_state", True) != step.preserve_rng_state:
        yield f"replays dropout: {said.get('preserve_rng_state', True)}"
    if (given.func is not checkpoint) != step.offload:
        yield "keeps its inputs on the device" if step.offload else "calls another function than torch's checkpoint"
    kept = sorted({_name(op, step.keep_ops) for op in said["context_fn"].args[0]}) if "context_fn" in said else []
    if kept != sorted(set(step.keep_ops)):
        yield f"keeps the outputs of {', '.join(kept) or 'nothing'}"


def _name(op: Any, planned: tuple[str, ...]) -> str:
    """The name of an overload, or of its operator where the plan means all of its overloads."""
    full = str(op)
    bare = full.rpartition(".")[0]
    return full if full in planned or bare not in planned else bare


def compiled(step: CompileModules, live: LiveModel) -> Iterator[Departure]:
    """A call of every planned module runs compiled code, compiled with the planned options."""
    bad = [path or "the model" for path in step.paths if not any(map(_runs_compiled, live.at(path)))]
    yield from each("CompileModules", "compiled code is bound", bad)
    if step.options and step.backend == "inductor":
        yield from each(
            "CompileModules", "options of the backend", [t for path in step.paths for t in _options(step, live, path)]
        )


def _options(step: CompileModules, live: LiveModel, path: str) -> Iterator[str]:
    """Those that differ; under ``fullgraph`` torch does not tell which it has (``torch._dynamo.optimize_assert``)."""
    calls = [m._compiled_call_impl for m in live.at(path) if m._compiled_call_impl is not None]
    for call in calls:
        config: dict[str, Any] | None = call.get_compiler_config()  # type: ignore[attr-defined]  # torch's optimize
        for option in step.options:
            if config is None:
                continue
            found = config.get(option.name.replace("-", "_"))
            if found != option.value:
                yield f"{path or 'the model'}: {option.name} planned {option.value!r}, found {found!r}"


def _runs_compiled(module: Module) -> bool:
    """Return whether a call of the module runs what was compiled from this very module, and not from a twin."""
    if "DeepSpeedEngine" in known_bases(type(module)):
        return bool(getattr(module, "is_compiled", False))  # it compiles the module inside
    compiled = module._compiled_call_impl
    source = getattr(compiled, "_torchdynamo_orig_callable", None)  # torch's wrapper names what it was made from
    return compiled is not None and getattr(source, "__self__", module) is module


def converted(step: ConvertFP8Linears, live: LiveModel) -> Iterator[Departure]:
    """Every planned layer is torchao's, with the planned way to multiply and to be gathered."""
    yield from each("ConvertFP8Linears", "layers compute in float8", _not_of(live, step.paths, "torchao.float8"))
    wrong = []
    for path in step.paths:
        config = getattr(_inner(live, path), "config", None)
        found = (getattr(config, "emulate", None), getattr(config, "enable_fsdp_float8_all_gather", None))
        if config is not None and found != (step.emulate, step.all_gather):
            wrong.append(f"{path} has emulate, all_gather {found}, planned {(step.emulate, step.all_gather)}")
    yield from each("ConvertFP8Linears", "layers are configured as planned", wrong)


def engine(step: ConvertTransformerEngine, live: LiveModel) -> Iterator[Departure]:
    """Every planned layer is TransformerEngine's."""
    yield from each(
        "ConvertTransformerEngine",
        "layers are TransformerEngine's",
        _not_of(live, (*step.linears, *step.norms), "transformer_engine"),
    )


def autocast(step: AutocastFP8Forward, live: LiveModel) -> Iterator[Departure]:
    """The forward stands where it was put: in the wrapper where there is one."""
    outer = (live.target.model, *live.modules[""])
    (found, *_) = (*(vars(module).get("forward") for module in outer if FP8_MARK in vars(module)), None)
    bad = []
    if not isinstance(found, FP8Forward):
        bad = [f"{type(live.target.model).__name__} has its own forward"]
    elif (type(found.recipe).__name__, found.during_eval) != (step.recipe, step.during_eval):
        bad = [f"found {type(found.recipe).__name__}, {'always' if found.during_eval else 'while the model trains'}"]
    yield from each("AutocastFP8Forward", "float8 autocast", bad)


def msamp(step: InitializeMSAMP, live: LiveModel) -> Iterator[Departure]:
    """Every Linear and the optimizer are MS-AMP's."""
    yield from each("InitializeMSAMP", "layers are MS-AMP's", _not_of(live, step.linears, "msamp"))
    optimizer = type(live.target.optimizer)
    own = optimizer.__module__.startswith("msamp")
    yield from each("InitializeMSAMP", "the optimizer is MS-AMP's", [] if own else [f"it is {optimizer.__name__}"])


def scales(step: PrecomputeFloat8Scales, live: LiveModel) -> Iterator[Departure]:
    """Something watches the optimizer."""
    del step
    hooks = getattr(live.target.optimizer, "_optimizer_step_post_hooks", None)
    yield from each(
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
