"""The parameters and buffers of a model by name, for the steps that give them values."""

from __future__ import annotations

from torch import Tensor

from prepkit.objects import fsdp1_flat, names, zero3
from prepkit.objects.local_part import local
from prepkit.objects.target import Target


def named_tensors(target: Target) -> dict[str, Tensor]:
    """Canonical name to parameter or buffer, each once, under its first name."""
    tensors: dict[str, Tensor] = dict(names.named_parameters(target.model))
    seen: set[int] = set()
    for site in names.sites(target.model):
        for key, buffer in site.module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                tensors[f"{site.path}.{key}" if site.path else key] = buffer
    return tensors


def named_parts(target: Target) -> dict[str, Tensor]:
    """Canonical name to what this rank holds of each tensor: its shard, or its elements in a row, a view.

    In a row lie those of a flat parameter (FSDP1) and those of a partitioned one (ZeRO-3).
    """
    flat = fsdp1_flat.flat_shards(target.model)
    parts = {name: _own(tensor) for name, tensor in named_tensors(target).items() if name not in flat}
    return parts | {name: shard.held() for name, shard in flat.items()}


def _own(tensor: Tensor) -> Tensor:
    return zero3.held(tensor) if zero3.is_partitioned(tensor) else local(tensor).detach()
