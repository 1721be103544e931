"""What a training loop needs of FSDP1: its switch for averaging, and clipping over shards that are plain tensors."""

from __future__ import annotations

from collections.abc import Iterable
from math import isinf
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module, Parameter

from prepkit.config import Clip, ClipNorm, ClipValue
from prepkit.objects import fsdp1_flat
from prepkit.ranks.world import ranks_of


def sync(units: Iterable[FullyShardedDataParallel], on: bool) -> None:
    """Sets what ``FullyShardedDataParallel.no_sync`` sets; every unit reads it in backward."""
    for unit in units:
        if unit._sync_gradients is not False:  # ``no_sync`` stands, and puts back what it has found
            unit._sync_gradients = on or 0  # type: ignore[assignment]  # torch gives nn.Module's attributes no types


def hold_gradients(units: Iterable[FullyShardedDataParallel]) -> bool:
    """Return whether a flat parameter has a gradient of a backward that no step has followed."""
    flats: Iterable[Any] = (unit._handle.flat_param for unit in units if unit._handle is not None)
    return any(flat.grad is not None or getattr(flat, "_saved_grad_shard", None) is not None for flat in flats)


def clip(model: Module, how: Clip, params: Iterable[Parameter]) -> torch.Tensor | None:
    """Clips the gradients in place; returns their joint norm before clipping where it had to be known.

    As ``FullyShardedDataParallel.clip_grad_norm_``, but over the optimizer's parameters alone. Collective for a norm.
    """
    with_grad = [param for param in params if param.grad is not None]
    match how:
        case None:
            return None
        case ClipValue(max_value=most):
            if with_grad:  # a rank whose shards are of frozen parameters alone has none, and torch takes no empty list
                torch.nn.utils.clip_grad_value_(with_grad, most)
            return None
        case ClipNorm(max_norm=most, norm_type=power):
            norm = total_norm(model, with_grad, power)
            torch.nn.utils.clip_grads_with_norm_(with_grad, most, norm)
            return norm


def total_norm(model: Module, params: list[Parameter], power: float) -> torch.Tensor:
    """The p-norm of all gradients as one vector: shards summed over the ranks that share them, whole ones once."""
    assert isinstance(model, FullyShardedDataParallel), "the table of drivers gives this one FSDP1 models only"
    shards = {id(param) for params_of_unit in _sharded(model) for param in params_of_unit}
    device: Any = model.compute_device
    parts = [_norm([p for p in params if (id(p) in shards) is which], power, device) for which in (True, False)]
    if shards:
        ranks = ranks_of(model.process_group)
        parts[0] = ranks.worst(parts[0]) if isinf(power) else ranks.total(parts[0] ** power) ** (1.0 / power)
    joint: torch.Tensor = torch.linalg.vector_norm(torch.stack(parts), power)
    return joint


def _sharded(model: Module) -> Iterable[tuple[Parameter, ...]]:
    """The parameters whose gradients are shards."""
    for unit in fsdp1_flat.units(model).values():
        handle = unit._handle
        if handle is not None and handle.uses_sharded_strategy:
            yield tuple(handle.flat_param._params or ()) or (handle.flat_param,)  # its own ones, where it kept them


def _norm(params: list[Parameter], power: float, device: torch.device) -> torch.Tensor:
    """In float32, as torch does; 0 without gradients."""
    grads = [param.grad.detach().float() for param in params if param.grad is not None and param.grad.numel()]
    if not grads:
        return torch.zeros((), device=device)
    return torch.nn.utils.get_total_norm(grads, power).to(device)
