"""Modules as a library has left them: modes, wrappers, forwards of other objects, tensors without sense."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dis import get_instructions
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parameter import is_lazy

from prepkit.facts.run import WrappedModule, Wrapper
from prepkit.objects.fsdp2_units import is_unit
from prepkit.objects.local_part import local
from prepkit.objects.names import Site, known_bases
from prepkit.observe.prepared.optimizers import short_digest

WRAPPERS: tuple[tuple[str, Wrapper], ...] = (
    ("DistributedDataParallel", "ddp"),
    ("OptimizedModule", "compiled"),
    ("CheckpointWrapper", "checkpointed"),
    ("FullyShardedDataParallel", "fsdp1"),
    ("DeepSpeedEngine", "deepspeed"),
)
"""Class of torch or DeepSpeed that stands around a module, and its word."""

DEEP = 8
"""Calls that are followed from a forward that was put in the place of a module's own."""


def wrapped(places: list[Site]) -> tuple[WrappedModule, ...]:
    """Every place with wrappers, outermost first; a module that checkpoints itself counts as its own wrapper."""
    found = (
        WrappedModule(path=site.path, wrappers=tuple(word for module in site.stack for word in _words(module)))
        for site in places
        if site.first
    )
    return tuple(one for one in found if one.wrappers)


def _words(module: nn.Module) -> Iterator[Wrapper]:
    bases = known_bases(type(module))
    yield from (word for name, word in WRAPPERS if name in bases)
    layer = any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)
    if layer and vars(module).get("gradient_checkpointing"):  # transformers; the flag above the layers does nothing
        yield "checkpointed"


def units(places: list[Site]) -> tuple[str, ...]:
    """Paths of the units of FSDP1 and FSDP2 that divide parameters of their own."""
    kinds = {"FullyShardedDataParallel", "FSDPModule"}
    return tuple(
        site.path
        for site in places
        if site.first and any(kinds & known_bases(type(module)) and _shards(module) for module in site.stack)
    )


def _shards(module: Any) -> bool:
    """Not a unit of FSDP1 that keeps everything on every rank."""
    return getattr(getattr(module, "sharding_strategy", None), "name", "") != "NO_SHARD"


def dropping(places: list[Site]) -> tuple[str, ...]:
    """Modules that drop elements when they train: torch's, its attention and RNNs, and attention of transformers'."""
    return tuple(site.path for site in places if site.first and rate(site.module) > 0)


def drops(model: nn.Module) -> int:
    """Return how many of them are in training mode, so that their next forward drops."""
    return sum(module.training and rate(module) > 0 for module in model.modules())


def rate(module: Any) -> float:
    """The part of the elements that it drops itself; 0 where it drops none, or has no number for it.

    A number named after dropout, on the module or in its ``config``, counts where no module below drops.
    """
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return float(module.p)
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return float(module.dropout)
    own = vars(module)
    config = own.get("config")
    told = {**(config if isinstance(config, dict) else getattr(config, "__dict__", {})), **own}
    numbers = {name: value for name, value in told.items() if _is_rate(name, value)}
    if numbers and any(isinstance(one, nn.modules.dropout._DropoutNd) for one in module.modules()):
        return float(numbers.get("attention_dropout", 0.0)) if "attention_dropout" in own else 0.0
    return float(max(numbers.values(), default=0.0))


def _is_rate(name: str, value: object) -> bool:
    return isinstance(value, float) and 0 < value <= 1 and ("dropout" in name or name.endswith("pdrop"))


def normalised(places: list[Site]) -> tuple[str, ...]:
    """Batch norms that see the batch of one rank alone."""
    return tuple(
        site.path
        for site in places
        if site.first
        and isinstance(site.module, nn.modules.batchnorm._BatchNorm)
        and not isinstance(site.module, nn.SyncBatchNorm)
    )


def evaluating(places: list[Site], dropout: tuple[str, ...]) -> tuple[str, ...]:
    """Outermost modules in evaluation mode that hold dropout and parameters that train."""
    found: list[str] = []
    for site in places:
        inside = any(site.path.startswith(f"{path}.") for path in found)
        if site.module.training or not site.first or inside or not site.path:
            continue
        drops = any(path == site.path or path.startswith(f"{site.path}.") for path in dropout)
        if drops and any(param.requires_grad for param in site.module.parameters()):
            found.append(site.path)
    return tuple(found)


def dropping_all(places: list[Site]) -> tuple[str, ...]:
    """Modules that drop every element when they train."""
    return tuple(site.path for site in places if site.first and rate(site.module) >= 1)


def infinite(params: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of those with an infinite element on this rank. Buffers may have some, as masks of attention do."""
    return tuple(name for name, param in params.items() if readable(local(param)) and _has_infinity(local(param)))


def zeros(params: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of trained matrices of which this rank holds zeros alone."""
    trained = {name: local(param) for name, param in params.items() if param.requires_grad and param.ndim > 1}
    return tuple(name for name, part in trained.items() if readable(part) and _all_zero(part))


def negative(places: list[Site]) -> tuple[str, ...]:
    """Running variances of batch norms with an element below zero."""
    return tuple(
        f"{site.path}.running_var" if site.path else "running_var"
        for site in places
        if site.first
        and isinstance(site.module, nn.modules.batchnorm._NormBase)
        and site.module.running_var is not None
        and readable(site.module.running_var)
        and bool((site.module.running_var < 0).any())
    )


def _has_infinity(part: Tensor) -> bool:
    total = part.detach().sum(dtype=torch.float64 if part.is_floating_point() else None)
    return not torch.isfinite(total).item() and bool(torch.isinf(part.detach()).any().item())


def _all_zero(part: Tensor) -> bool:
    first = part.detach().reshape(-1)[0] if part.is_contiguous() else part.detach().flatten()[0]
    return not first.item() and not part.detach().count_nonzero().item()


def with_nan(tensors: dict[str, Tensor]) -> tuple[str, ...]:
    """Names of the tensors with NaN among the elements of this rank; those without data have none."""
    return tuple(name for name, tensor in tensors.items() if _has_nan(local(tensor)))


def readable(part: Tensor) -> bool:
    """Return whether it holds numbers that may be broken."""
    if is_lazy(part):  # without a shape yet
        return False
    data = part.device.type != "meta" and not isinstance(part, FakeTensor) and part.numel() > 0
    return data and (part.is_floating_point() or part.is_complex())


def _has_nan(part: Tensor) -> bool:
    if not readable(part):
        return False
    return bool(torch.isnan(part.detach().sum(dtype=torch.float64 if part.is_floating_point() else None)).item()) and (
        bool(torch.isnan(part.detach()).any().item())  # a sum of both infinities is NaN too
    )


def elsewhere(places: list[Site], to: Container[int] | None = None) -> tuple[str, ...]:
    """Modules with a forward of their own that leads to modules, and to none of this model; ``to``: to one of these."""
    here = {id(module) for site in places for module in site.stack}
    found: list[str] = []
    for site in places:
        for module in site.stack if site.first else ():
            scripted = isinstance(module, torch.jit.ScriptModule)  # whose methods all stand on the object
            forward = None if scripted else vars(module).get("forward")
            owners = list(_owners(forward, DEEP)) if forward is not None else []
            leads = any(to is None or id(owner) in to for owner in owners)
            if leads and not any(id(owner) in here for owner in owners):
                found.append(site.path)
    return tuple(found)


def _owners(call: Any, depth: int) -> Iterator[nn.Module]:
    """The modules that a callable computes with, as far as it can be told without calling it."""
    if depth == 0:
        return
    match call:
        case nn.Module():
            yield call
        case MethodType():
            yield from _owners(call.__self__, depth - 1)
            yield from _owners(call.__func__, depth - 1)
        case partial():
            for one in (call.func, *call.args, *call.keywords.values()):
                yield from _owners(one, depth - 1)
        case FunctionType():
            for one in (*_cells(call.__closure__), *_globals(call), getattr(call, "__wrapped__", None)):
                yield from _owners(one, depth - 1)
        case _ if callable(call) and not isinstance(call, type) and hasattr(call, "__dict__"):
            for one in vars(call).values():
                yield from _owners(one, depth - 1)


def _cells(closure: tuple[CellType, ...] | None) -> Iterator[Any]:
    for cell in closure or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue


def _globals(call: FunctionType) -> Iterator[Any]:
    """Models, and methods of models, that a function names and its file has."""
    for name in dict.fromkeys(one.argval for one in get_instructions(call) if one.opname == "LOAD_GLOBAL"):
        held = call.__globals__.get(name)
        module = held.__self__ if isinstance(held, MethodType) else held
        if isinstance(module, nn.Module) and next(module.parameters(), None) is not None:
            yield held


def generator(kind: str) -> float:
    """The state of the generator that dropout draws from on this kind of device; 0: not known.

    A number below 2**24, which float32 holds: the loop sends it with others, and the audit compares the same. Takes 5
    to 20 microseconds, and nothing waits for the device (torch ``get_rng_state``).
    """
    if kind == "cpu":
        state: Tensor = torch.get_rng_state()
    else:
        try:
            module = torch.get_device_module(kind)
        except RuntimeError:
            return 0.0
        if not (hasattr(module, "get_rng_state") and module.is_available()):
            return 0.0
        state = module.get_rng_state()
    return short_digest(state.cpu().numpy().tobytes())


def float16_units(root: nn.Module) -> Iterator[str]:
    """Yield the class of the options by which a unit of FSDP1 or FSDP2 computes in float16."""
    for module in root.modules():
        fsdp1 = isinstance(module, FullyShardedDataParallel)
        options: Any = None
        if fsdp1 or is_unit(module):
            options = module.mixed_precision if fsdp1 else module._get_fsdp_state()._mp_policy  # type: ignore[operator]
        if getattr(options, "param_dtype", None) == torch.float16:
            yield type(options).__name__
