"""A sharded model made whole on rank 0, one unit or parameter after the other: FSDP1 and DeepSpeed.

torch's full state dict of FSDP1 ends the process by a segmentation fault where the shards lie on a CPU (torch 2.13);
here the flat parameters are gathered by one collective each, and cut where ``fsdp1_flat`` says the parameters lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from prepkit.live.checkpoints.failures import CheckpointFailed
from prepkit.live.checkpoints.state import is_deepspeed
from prepkit.live.model import fsdp1_flat, names
from prepkit.live.model.fsdp1_flat import FlatShard


def whole(model: Module, *, masters: bool = True) -> dict[str, Tensor]:
    """Canonical name to the whole tensor in host memory, on rank 0; the others help, and get nothing. Collective.

    Trained parameters are the master weights, where an engine keeps some, unless ``masters`` is False. A tied one is
    there under its first name, buffers are those of rank 0.
    """
    keeps = not dist.is_initialized() or dist.get_rank() == 0
    tensors: dict[str, Tensor] = {}
    for name, tensor in _parameters(model, masters):
        if keeps:
            tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
    for name, buffer in _buffers(model):
        if keeps:
            tensors[name] = buffer.detach().to("cpu", copy=True).contiguous()
    return tensors


def _parameters(model: Module, masters: bool) -> Iterator[tuple[str, Tensor]]:
    """In the order of the units; the same on every rank, as each takes a collective."""
    if is_deepspeed(model):
        if any(hasattr(param, "ds_autotp_universal_checkpoint_meta") for param in model.parameters()):
            raise CheckpointFailed(
                "DeepSpeed has split the layers over ranks; write ready.model.save_16bit_model(folder)"
            )
        for name, param in names.named_parameters(model).items():
            yield name, _of_deepspeed(param, masters)
        return
    shards = fsdp1_flat.flat_shards(model)
    for name, param in names.named_parameters(model).items():
        if name not in shards and not any(param is shard.flat for shard in shards.values()):
            yield name, param
    units = fsdp1_flat.units(model)
    for path, group in groupby(shards.items(), key=lambda item: item[1].unit):
        places = list(group)
        row = _flat(units[path], places[0][1])
        for name, shard in places:
            yield name, row.as_strided(shard.shape, shard.stride, shard.start)


def _flat(unit: Any, shard: FlatShard) -> Tensor:
    """The whole flat parameter of a unit, in the dtype of the master weights. Collective over the unit's shards."""
    local = shard.flat.detach()
    if not shard.cut:
        return local
    device = unit.compute_device
    part = local.to(device)
    row = torch.empty(shard.shard * dist.get_world_size(unit.process_group), dtype=part.dtype, device=device)
    dist.all_gather(list(row.chunk(len(row) // shard.shard)), part, group=unit.process_group)
    return row


def _buffers(model: Module) -> Iterator[tuple[str, Tensor]]:
    for site in names.sites(model):
        for name, buffer in site.module._buffers.items() if site.first else ():
            if buffer is not None and name not in site.module._non_persistent_buffers_set:
                yield f"{site.path}.{name}" if site.path else name, buffer


def _of_deepspeed(tensor: Tensor, masters: bool = True) -> Tensor:
    """The whole tensor on every rank: the master weights where DeepSpeed keeps some, and ``masters`` says so."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    kept = (hasattr(tensor, "_z3_optimizer") and tensor.requires_grad) or hasattr(tensor, "_hp_mapping")
    if masters and kept:
        master: Tensor | None = safe_get_full_fp32_param(tensor)
        if master is not None:
            return master
    if isinstance(tensor, Parameter) and hasattr(tensor, "ds_id"):
        with GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor
