"""What was done to single modules: recomputed, compiled, run under autocast; and what stands inside callables."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from attrs import evolve
from torch._ops import OpOverload
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, CheckpointWrapper
from torch.utils.checkpoint import checkpoint

from prepkit.facts.preparation import AutocastOptions, CompiledModule, RecomputedModule
from prepkit.objects.forward import AutocastedForward, CastedForward
from prepkit.objects.names import Site, known_bases
from prepkit.objects.recomputation import offloaded, overloads
from prepkit.observe.model import dtype_name

AROUND = frozenset({"DistributedDataParallel", "FullyShardedDataParallel"})
MODES = ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def recomputed(places: list[Site]) -> tuple[RecomputedModule, ...]:
    """Every module whose activations are recomputed, in module order."""
    return tuple(one for site in places if site.first for one in _recomputed(site))


def _recomputed(site: Site) -> Iterator[RecomputedModule]:
    for module in site.stack:
        if isinstance(module, CheckpointWrapper):
            yield _wrapper(site.path, module)
    own = vars(site.module)
    layer = any(base.__name__ == "GradientCheckpointingLayer" for base in type(site.module).__mro__)
    if layer and own.get("gradient_checkpointing"):
        said = getattr(own.get("_gradient_checkpointing_func"), "keywords", {})
        yield RecomputedModule(
            path=site.path,
            by="itself",
            reentrant=bool(said.get("use_reentrant")),
            preserve_rng_state=bool(said.get("preserve_rng_state", True)),
        )


def _wrapper(path: str, wrapper: CheckpointWrapper) -> RecomputedModule:
    given: Any = wrapper.checkpoint_fn
    said = dict(given.keywords)
    kept = said.pop("context_fn", None)
    ops = [op for op in getattr(kept, "args", ((),))[0] if isinstance(op, OpOverload)] if kept is not None else []
    known = given.func in (checkpoint, offloaded) and (kept is None or bool(ops))
    rest = sorted(set(said) - {"use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop"})
    return RecomputedModule(
        path=path,
        reentrant=wrapper.checkpoint_impl is CheckpointImpl.REENTRANT,
        preserve_rng_state=bool(said.get("preserve_rng_state", True)),
        keep_ops=_op_names(ops),
        offload=given.func is offloaded,
        unknown=", ".join(rest) if known else getattr(given.func, "__qualname__", "a function of its own"),
    )


def _op_names(ops: list[OpOverload]) -> tuple[str, ...]:
    """``aten.mm`` where all of its overloads are there, else each by its whole name."""
    here = {str(op) for op in ops}
    names: dict[str, None] = {}
    for name in map(str, ops):
        bare = name.rpartition(".")[0]
        names[bare if {str(op) for op in overloads(bare)} <= here else name] = None
    return tuple(names)


def compiled(places: list[Site]) -> tuple[CompiledModule, ...]:
    """Every module with compiled code, in module order."""
    found = []
    for site in places:
        inside = False
        for module in site.stack if site.first else ():
            bases = known_bases(type(module))
            call = vars(module).get("_compiled_call_impl")
            if "OptimizedModule" in bases or call is not None:
                context = vars(module).get("dynamo_ctx") if call is None else _context(call)
                found.append(evolve(_compiled(site.path, context), inside=inside))
            inside = inside or not AROUND.isdisjoint(bases)
    return tuple(found)


def _context(call: Any) -> Any:
    """Dynamo's context in a compiled call, where this torch keeps it in the closure (torch ``_dynamo.eval_frame``)."""
    return next((part for part in inside(call) if hasattr(part, "compiler_config") and hasattr(part, "callback")), None)


def _compiled(path: str, context: Any) -> CompiledModule:
    backend = context
    layers = []
    for name in ("callback", *("_torchdynamo_orig_backend",) * 6):
        backend = getattr(backend, name, None)
        layers.append(backend)
    named = next((one for one in reversed(layers) if hasattr(one, "compiler_name")), None)
    plain = next((one for one in reversed(layers) if getattr(one, "_compiler_name", None)), None)
    if context is None or (named is None and plain is None):
        return CompiledModule(path=path, backend="", unknown="with what torch.compile was asked for it does not tell")
    mode, options = _asked(named)
    limits = (getattr(layer, "_recompile_limit", None) for layer in layers)
    return CompiledModule(
        path=path,
        backend=str(getattr(named, "compiler_name", "") or getattr(plain, "_compiler_name", "")),
        mode=mode,
        fullgraph=bool(getattr(context, "fullgraph", False)),
        dynamic=getattr(context, "_dynamic", None),
        options=tuple((key, value) for key, value in options.items() if isinstance(value, bool | int | float | str)),
        recompile_limit=next((limit for limit in limits if isinstance(limit, int)), None),
        isolate_recompiles=getattr(context, "_isolate_recompiles_id", -1) not in (-1, None),
    )


def _asked(backend: Any) -> tuple[str, dict[str, Any]]:
    """Mode and options: inductor keeps the two as one set of settings, and a mode is known by what it sets."""
    settings = dict(getattr(backend, "config", None) or {})
    if not settings:
        given = dict(getattr(backend, "kwargs", {}))
        return str(given.get("mode", "default")), dict(given.get("options", {}))
    for mode in MODES:
        if settings == torch._inductor.list_mode_options(mode, getattr(backend, "dynamic", None)):
            return mode, {}
    return "default", settings


def autocast(places: list[Site]) -> AutocastOptions | None:
    """The autocast that the root's forward runs under, as prepkit or accelerate has put it there."""
    for module in reversed(places[0].stack):
        forward = vars(module).get("forward")
        parts = list(inside(forward)) if forward is not None else []
        for part in parts:
            if isinstance(part, AutocastedForward | CastedForward):
                return AutocastOptions(
                    dtype=dtype_name(part.dtype), output_dtype=dtype_name(part.output_dtype), by="prepkit"
                )
        cast = next((part for part in parts if isinstance(part, torch.autocast)), None)
        if cast is not None and cast.fast_dtype is not None:
            whole = any(type(part).__name__ == "ConvertOutputsToFp32" for part in parts)
            return AutocastOptions(
                dtype=dtype_name(cast.fast_dtype), output_dtype="float32" if whole else None, by="accelerate"
            )
    return None


DEEP = 8
"""Callables inside one another that are followed."""


def inside(call: Any, depth: int = DEEP) -> Iterator[Any]:
    """The callable, and all that it is made of, the outermost first."""
    if depth == 0:
        return
    yield call
    match call:
        case MethodType():
            parts = [call.__func__, call.__self__] if not hasattr(call.__self__, "_modules") else [call.__func__]
        case partial():
            parts = [call.func, *call.args, *call.keywords.values()]
        case FunctionType():
            parts = [*contents(call), getattr(call, "__wrapped__", None)]
        case _ if callable(call) and not isinstance(call, type) and hasattr(call, "__dict__"):
            parts = [] if hasattr(call, "_modules") else list(vars(call).values())
        case _:
            parts = []
    for part in parts:
        if part is not None:
            yield from inside(part, depth - 1)


def contents(function: FunctionType) -> Iterator[Any]:
    """Yield what its closure holds."""
    cells: tuple[CellType, ...] = function.__closure__ or ()
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
