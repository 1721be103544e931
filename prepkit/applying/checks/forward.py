"""What a block does besides its own forward: recomputed in backward, or compiled. As planned, or not. Reads only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.nn import Module
from torch.utils.checkpoint import checkpoint

from prepkit.objects.names import known_bases
from prepkit.objects.state import LiveModel
from prepkit.plan.attestation import Check, each
from prepkit.steps import CheckpointModules, CompileModules


def checkpointed(step: CheckpointModules, live: LiveModel) -> Iterator[Check]:
    """A checkpoint wrapper stands at every planned path, and recomputes, keeps and moves what was planned."""
    wrappers = {path: [m for m in live.at(path) if isinstance(m, CheckpointWrapper)] for path in step.paths}
    yield each("CheckpointModules", "wrapped", [path for path, found in wrappers.items() if not found])
    texts = [f"{path} {text}" for path, found in wrappers.items() for one in found for text in _differs(step, one)]
    yield each("CheckpointModules", "what is recomputed, kept and offloaded", texts)


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


def compiled(step: CompileModules, live: LiveModel) -> Iterator[Check]:
    """A call of every planned module runs compiled code, compiled with the planned options."""
    bad = [path or "the model" for path in step.paths if not any(map(_runs_compiled, live.at(path)))]
    yield each("CompileModules", "compiled code is bound", bad)
    if step.options and step.backend == "inductor":
        yield each(
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
    """Whether a call of the module runs what was compiled from this very module, and not from a twin."""
    if "DeepSpeedEngine" in known_bases(type(module)):
        return bool(getattr(module, "is_compiled", False))  # it compiles the module inside
    compiled = module._compiled_call_impl
    source = getattr(compiled, "_torchdynamo_orig_callable", None)  # torch's wrapper names what it was made from
    return compiled is not None and getattr(source, "__self__", module) is module
