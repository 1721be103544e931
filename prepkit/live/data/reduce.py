"""Numbers of all ranks as one, for a script that prints them or decides by them: ``ready.reduce``, ``ready.gather``.

Both take nested containers, as ``torch.utils._pytree`` flattens them, and count ranks that read the same data once.
"""

from __future__ import annotations

import hashlib
import pickle
from numbers import Number
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from prepkit.live.data.gather import travels_on

How = Literal["mean", "sum", "max", "min"]
EXACT = 2**53
"""Up to here float64 has every integer."""
_OPERATIONS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def reduce_over_ranks(value: Any, how: How, same_data: int) -> Any:
    """Every number and tensor of the value as mean, sum, max or min over the data ranks; equal on all. Collective.

    ``same_data``: neighbouring ranks that read the same samples, and give the same. Tensors keep shape and device; a
    mean is a float. Sums in float64 where the device has it. Raises ``TypeError`` for leaves that are no numbers, and
    ``ValueError`` for another ``how`` or integers too large to add up; then the other ranks, and every rank where
    structures, shapes, dtypes or ``how`` differ, raise ``ValueError``: none is left waiting.
    """
    flat, form = pytree.tree_flatten(value)
    several = dist.is_initialized() and dist.get_world_size() > 1
    ranks = dist.get_world_size() if several else 1
    problem = _problem(flat, how, ranks)
    if several:
        said = f"{how!r:.40} of {form} {[_described(leaf) for leaf in flat]}"
        _refuse_difference(said if problem is None else f"refused here: {problem}", flat)
    if problem is not None:
        raise problem
    flat = [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in flat]
    joint = [_packed(leaf) for leaf in flat]
    if several and flat:
        joint = _reduced(joint, how)
    divided = {"mean": ranks, "sum": same_data if ranks > 1 else 1}.get(how, 1)
    joint = [part / divided for part in joint]
    return pytree.tree_unflatten([_as_given(p, leaf, how) for p, leaf in zip(joint, flat, strict=True)], form)


def _problem(flat: list[Any], how: str, ranks: int) -> Exception | None:
    """Why this cannot be reduced, whatever the other ranks give."""
    if how not in get_args(How):
        return ValueError(f"how={how!r:.40}: write one of {', '.join(get_args(How))}")
    for leaf in flat:
        if not isinstance(leaf, Tensor | int | float) or (isinstance(leaf, Tensor) and leaf.is_complex()):
            return TypeError(f"ready.reduce takes tensors and numbers, nested or not, and not {leaf!r:.60}")
        if _whole(leaf) > EXACT / (ranks if how in ("mean", "sum") else 1):
            what = f"{leaf!r:.60} over {ranks} ranks needs more than the 53 bits that are added up exactly"
            return ValueError(f"{what}; ready.gather it, or give it as a float")
    return None


def _whole(leaf: Tensor | float) -> int:
    """The largest magnitude of integers that float64 may not have; 0 for others."""
    if not isinstance(leaf, Tensor):
        return abs(leaf) if isinstance(leaf, int) else 0
    if leaf.dtype not in (torch.int64, torch.uint64) or leaf.numel() == 0:
        return 0
    part = leaf.to_local() if isinstance(leaf, DTensor) else leaf
    return max(abs(int(part.max())), abs(int(part.min()))) if part.numel() else 0


def gather_over_ranks(value: Any, same_data: int) -> list[Any]:
    """What each data rank gives, in the order of the ranks: any picklable value. Collective.

    Tensors travel through host memory and arrive where this rank's accelerator is, or on the CPU where they were
    there: for what is small. Rows of many samples go through ``gather_for_metrics``. Raises ``TypeError`` on every rank
    where one has a value that cannot be pickled.
    """
    sent = pytree.tree_map_only(Tensor, _on_host, value)
    everyone: list[Any] = [sent]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [pickle.loads(data) for data in _exchanged(sent)]  # from ranks that run this very program
    devices = {leaf.device for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)}
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    return [pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), one) for one in everyone[::same_data]]


def _exchanged(value: Any) -> list[bytes]:
    """The pickled value of each rank."""
    failed, data = "", b""
    try:
        data = pickle.dumps(value)
    except Exception as error:  # pickling calls code of any class
        failed = f"{type(error).__name__}: {error!s:.200}"
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (failed, data))
    for rank, (why, _) in enumerate(told):
        if why:
            raise TypeError(f"what rank {rank} gives ready.gather cannot be sent: {why}")
    return [sent for _, sent in told]


def _on_host(leaf: Tensor) -> Tensor:
    return (leaf.full_tensor() if isinstance(leaf, DTensor) else leaf).detach().cpu()


def _packed(leaf: Tensor | Number) -> Tensor:
    """In float64, which has every number of 52 bits and every float; a device without it has float32."""
    if not isinstance(leaf, Tensor):
        return torch.tensor(leaf, dtype=torch.float64)
    return leaf.detach().to(torch.float32 if leaf.device.type == "mps" else torch.float64)


def _described(leaf: Tensor | Number) -> str:
    return f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else "number"


def _reduced(parts: list[Tensor], how: How) -> list[Tensor]:
    """All of them as one tensor."""
    device = _device(parts)
    flat = torch.cat([part.reshape(-1).to(device) for part in parts])
    dist.all_reduce(flat, op=_OPERATIONS[how])
    pieces = torch.split(flat, [part.numel() for part in parts])
    return [piece.view(part.shape).to(part.device) for piece, part in zip(pieces, parts, strict=True)]


def _device(leaves: list[Any]) -> torch.device:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    on_accelerator = (leaf for leaf in tensors if leaf.device.type != "cpu")
    return travels_on(next(on_accelerator, tensors[0] if tensors else torch.zeros(())))


def _refuse_difference(description: str, leaves: list[Any]) -> None:
    """Raises on every rank where they do not mean the same."""
    mark = int.from_bytes(hashlib.sha256(description.encode()).digest()[:6], "big")
    marks = torch.tensor([mark, -mark], device=_device(leaves))
    dist.all_reduce(marks, op=dist.ReduceOp.MAX)
    if marks[0] != -marks[1]:
        raise ValueError(
            "the ranks give ready.reduce values of different structure, shape or dtype, or another how, or one that "
            f"cannot be reduced; this one {description:.200}"
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
