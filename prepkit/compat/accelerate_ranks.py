"""What an ``Accelerator`` does over all ranks: tensors gathered and reduced, and a group before there is a plan."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from prepkit.compat.not_offered import NotOffered

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Device type to the backend of a group that any plan takes over: gloo as well, for what is offloaded."""


def start_group(device: torch.device, timeout_s: float) -> None:
    """Starts the process group. Raises ``NotOffered`` on a device whose backend only a plan chooses."""
    backend = _BACKENDS.get(device.type)
    if backend is None:
        what = "call it after accelerator.prepare, which starts the process group"
        raise NotOffered(f"waiting before prepare on {device.type}", what)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))


def gathered(value: Any) -> Any:
    """A tensor of every rank, all of one shape, joined in the first dimension; other values as they are."""
    if not isinstance(value, torch.Tensor) or not dist.is_initialized():
        return value
    value = value.detach().contiguous()
    value = value[None] if value.ndim == 0 else value
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, value)
    return torch.cat(parts)


def reduced(value: Any, reduction: str, scale: float) -> Any:
    """A tensor summed, or averaged, over the ranks; other values as they are."""
    if reduction not in ("sum", "mean"):
        raise NotOffered(f"reduce({reduction!r})", "write sum or mean")
    if not isinstance(value, torch.Tensor):
        return value
    total, ranks = value.detach().clone(), 1
    if dist.is_initialized():
        dist.all_reduce(total)
        ranks = dist.get_world_size()
    return total * scale / (ranks if reduction == "mean" else 1)
