"""Numbers of all ranks as one, for a script that prints them or decides by them: ``ready.reduce``, ``ready.gather``.

Both take nested containers, as ``torch.utils._pytree`` flattens them, and count ranks that read the same data once.
"""

from __future__ import annotations

import hashlib
from numbers import Number
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from prepkit.live.data.gather import travels_on

How = Literal["mean", "sum", "max", "min"]
_OPERATIONS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def reduce_over_ranks(value: Any, how: How, same_data: int) -> Any:
    """Every number and tensor of the value as mean, sum, max or min over the data ranks; equal on all. Collective.

    ``same_data``: neighbouring ranks that read the same samples, and give the same. Tensors keep shape and device; a
    mean is a float. Sums in float64 where the device has it. Raises ``TypeError`` for leaves that are no numbers, and
    ``ValueError`` for another ``how``, and on every rank where structures, shapes, dtypes or ``how`` differ.
    """
    if how not in get_args(How):
        raise ValueError(f"how={how!r:.40}: write one of {', '.join(get_args(How))}")
    flat, form = pytree.tree_flatten(value)
    flat = [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in flat]
    for leaf in flat:
        if not isinstance(leaf, Tensor | int | float) or (isinstance(leaf, Tensor) and leaf.is_complex()):
            raise TypeError(f"ready.reduce takes tensors and numbers, nested or not, and not {leaf!r:.60}")
    joint, ranks = [_packed(leaf) for leaf in flat], 1
    if dist.is_initialized() and dist.get_world_size() > 1 and flat:
        ranks = dist.get_world_size()
        joint = _reduced(joint, how, f"{how} of {form} {[_described(leaf) for leaf in flat]}")
    divided = {"mean": ranks, "sum": same_data if ranks > 1 else 1}.get(how, 1)
    joint = [part / divided for part in joint]
    return pytree.tree_unflatten([_as_given(p, leaf, how) for p, leaf in zip(joint, flat, strict=True)], form)


def gather_over_ranks(value: Any, same_data: int) -> list[Any]:
    """What each data rank gives, in the order of the ranks: any picklable value. Collective.

    Tensors travel through host memory and arrive where this rank's accelerator is, or on the CPU where they were
    there: for what is small. Rows of many samples go through ``gather_for_metrics``.
    """
    sent = pytree.tree_map_only(Tensor, _on_host, value)
    everyone: list[Any] = [sent]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, sent)
    devices = {leaf.device for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)}
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    return [pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), one) for one in everyone[::same_data]]


def _on_host(leaf: Tensor) -> Tensor:
    return (leaf.full_tensor() if isinstance(leaf, DTensor) else leaf).detach().cpu()


def _packed(leaf: Tensor | Number) -> Tensor:
    """In float64, which has every number of 52 bits and every float; a device without it has float32."""
    if not isinstance(leaf, Tensor):
        return torch.tensor(leaf, dtype=torch.float64)
    return leaf.detach().to(torch.float32 if leaf.device.type == "mps" else torch.float64)


def _described(leaf: Tensor | Number) -> str:
    return f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else "number"


def _reduced(parts: list[Tensor], how: How, description: str) -> list[Tensor]:
    """All of them as one tensor, after a look at whether the ranks mean the same by it."""
    device = travels_on(next((part for part in parts if part.device.type != "cpu"), parts[0]))
    _refuse_difference(description, device)
    flat = torch.cat([part.reshape(-1).to(device) for part in parts])
    dist.all_reduce(flat, op=_OPERATIONS[how])
    pieces = torch.split(flat, [part.numel() for part in parts])
    return [piece.view(part.shape).to(part.device) for piece, part in zip(pieces, parts, strict=True)]


def _refuse_difference(description: str, device: torch.device) -> None:
    mark = int.from_bytes(hashlib.sha256(description.encode()).digest()[:6], "big")
    marks = torch.tensor([mark, -mark], device=device)
    dist.all_reduce(marks, op=dist.ReduceOp.MAX)
    if marks[0] != -marks[1]:
        raise ValueError(
            "the ranks give ready.reduce values of different structure, shape or dtype, or another how; "
            f"this one {description:.200}"
        )


def _as_given(joint: Tensor, leaf: Tensor | Number, how: How) -> Any:
    if not isinstance(leaf, Tensor):
        number = float(joint.item())
        whole = isinstance(leaf, int) and how != "mean" and number.is_integer()  # another rank may give a float
        return int(number) if whole else number
    if leaf.is_floating_point():
        return joint.to(leaf.dtype)
    if how == "mean":
        return joint.to(torch.float32)
    return joint.round().to(torch.int64 if leaf.dtype == torch.bool and how == "sum" else leaf.dtype)
