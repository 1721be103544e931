"""What DDP and the units of FSDP1 were asked for, read from their attributes."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from prepkit.facts.preparation import DDPOptions, FlatUnitOptions, NamedValues
from prepkit.objects.names import Site
from prepkit.observe.model import dtype_name
from prepkit.ranks.world import ranks_of

WRAPPERS = ("fp16_compress_wrapper", "bf16_compress_wrapper")
"""Communication hooks of torch around another hook."""


def ddp_options(places: list[Site]) -> DDPOptions | None:
    """Of the DDP around the whole model; None where none is there."""
    found = next((module for module in places[0].stack if isinstance(module, DistributedDataParallel)), None)
    if found is None:
        return None
    ddp: Any = found
    return DDPOptions(
        ranks=ranks_of(ddp.process_group).size,
        broadcast_buffers=bool(ddp.broadcast_buffers),
        bucket_cap_mb=ddp.bucket_bytes_cap / 2**20,
        find_unused_parameters=bool(ddp.find_unused_parameters),
        gradient_as_bucket_view=bool(ddp.gradient_as_bucket_view),
        static_graph=bool(ddp.static_graph),
        hooks=tuple((_hook_name(hook), _state(state)) for hook, state in ddp._comm_hooks),
        mixed=getattr(ddp, "mixed_precision", None) is not None,
    )


def _hook_name(hook: Any) -> str:
    """``powerSGD_hook``, or ``fp16_compress_wrapper powerSGD_hook`` where one stands around the other."""
    outer = getattr(hook, "__qualname__", type(hook).__name__).partition(".")[0]
    if outer not in WRAPPERS:
        return outer if getattr(hook, "__module__", "").startswith("torch.") else f"a hook of its own, {outer}"
    inside = [cell.cell_contents for cell in hook.__closure__ or () if callable(cell.cell_contents)]
    return " ".join((outer, *map(_hook_name, inside)))


def _state(state: Any) -> NamedValues:
    names = {*getattr(type(state), "__slots__", ()), *getattr(state, "__dict__", ())}
    values = ((name, getattr(state, name, None)) for name in sorted(names))
    return tuple((name, value) for name, value in values if isinstance(value, bool | int | float | str))


def flat_units(places: list[Site]) -> tuple[FlatUnitOptions, ...]:
    """Of every unit of FSDP1, in module order."""
    return tuple(
        _flat_unit(site.path, module)
        for site in places
        if site.first
        for module in site.stack
        if isinstance(module, FullyShardedDataParallel)
    )


def _flat_unit(path: str, unit: Any) -> FlatUnitOptions:
    mixed, prefetch = unit.mixed_precision, unit.backward_prefetch
    between = getattr(unit, "_inter_node_pg", None)
    hybrid = "HYBRID" in unit.sharding_strategy.name
    return FlatUnitOptions(
        path=path,
        ranks=ranks_of(unit.process_group).size,
        copies=ranks_of(between).size if hybrid and between is not None else 1,
        sharding=unit.sharding_strategy.name.removeprefix("_"),
        param_dtype=_dtype(mixed.param_dtype),
        reduce_dtype=_dtype(mixed.reduce_dtype),
        buffer_dtype=_dtype(mixed.buffer_dtype),
        offload=bool(unit.cpu_offload.offload_params),
        backward_prefetch=None if prefetch is None else prefetch.name,
        forward_prefetch=bool(unit.forward_prefetch),
        limit_all_gathers=bool(unit.limit_all_gathers),
        use_orig_params=bool(unit._use_orig_params),
        cast_forward_inputs=bool(mixed.cast_forward_inputs),
        cast_root_forward_inputs=bool(mixed.cast_root_forward_inputs),
    )


def _dtype(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else dtype_name(dtype)
