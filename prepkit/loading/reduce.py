"""Values of all ranks for a script that prints them or decides by them: ``reduce``, ``gather``, ``gather_for_metrics``.

They take nested containers, as ``torch.utils._pytree`` flattens them, and count ranks that read the same data once.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from numbers import Number
from typing import Any, Literal, get_args

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from prepkit.court import refused
from prepkit.loading.streams import BatchRead
from prepkit.ranks.world import Ranks, world

How = Literal["mean", "sum", "max", "min"]
EXACT = 2**53
"""Up to here float64 has every integer."""
_OPERATIONS = {"mean": Ranks.total, "sum": Ranks.total, "max": Ranks.worst, "min": Ranks.least}


def reduce_over_ranks(value: Any, how: How, same_data: int) -> Any:
    """Every number and tensor of the value as mean, sum, max or min over the data ranks; equal on all. Collective.

    ``same_data``: neighbouring ranks that read the same samples, and give the same. Tensors keep shape and device; a
    mean is a float. Sums in float64 where the device has it. Raises ``TypeError`` for leaves that are no numbers, and
    ``ValueError`` for another ``how`` or integers too large to add up; then the other ranks, and every rank where
    structures, shapes, dtypes or ``how`` differ, raise ``ValueError``: none is left waiting.
    """
    flat, form = pytree.tree_flatten(value)
    several, ranks = world().carries_data, world().size
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
            return TypeError(f"ready.ranks.reduce takes tensors and numbers, nested or not, and not {leaf!r:.60}")
        if _whole(leaf) > EXACT / (ranks if how in ("mean", "sum") else 1):
            what = f"{leaf!r:.60} over {ranks} ranks needs more than the 53 bits that are added up exactly"
            return ValueError(f"{what}; ready.ranks.gather it, or give it as a float")
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
    """Values of the data ranks in the order of the ranks: anything that can be pickled. Collective.

    Tensors travel through host memory and arrive where this rank's accelerator is, or on the CPU where they were
    there: for what is small. Rows of many samples go through ``gather_for_metrics``. Raises ``TypeError`` on every rank
    where one has a value that cannot be pickled.
    """
    sent = pytree.tree_map_only(Tensor, _on_host, value)
    everyone: list[Any] = [sent]
    if world().carries_data:
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
    told = world().gather((failed, data))
    for rank, (why, _) in enumerate(told):
        if why:
            raise TypeError(f"what rank {rank} gives ready.ranks.gather cannot be sent: {why}")
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
    flat = _OPERATIONS[how](world(), flat)
    pieces = torch.split(flat, [part.numel() for part in parts])
    return [piece.view(part.shape).to(part.device) for piece, part in zip(pieces, parts, strict=True)]


def _device(leaves: list[Any]) -> torch.device:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    on_accelerator = (leaf for leaf in tensors if leaf.device.type != "cpu")
    return world().wire(next(on_accelerator, tensors[0] if tensors else torch.zeros((), device="cpu")).device)


def _refuse_difference(description: str, leaves: list[Any]) -> None:
    """Raises on every rank where they do not mean the same."""
    mark = int.from_bytes(hashlib.sha256(description.encode()).digest()[:6], "big")
    least, most = world().spread(torch.tensor(mark, device=_device(leaves)))
    if least != most:
        what = f"ranks give values of different structure, shape or dtype, or another how; this one {description:.200}"
        raise refused("run.ranks-give", "ready.ranks.reduce", what)


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


@frozen(eq=False, repr=False)
class Told:
    """Description of one rank's value, exchanged before it is gathered."""

    part: int
    size: int | None
    counted: int | None
    began: int
    """A digest of what the stream gave before it was divided; 0: not known."""
    leaves: tuple[tuple[Any, ...], ...] | None
    """Shape and dtype of each tensor; None: the value is no structure of tensors."""

    def kept(self, length: int) -> int:
        """Return how many of so many rows are no repeats."""
        return length if self.counted is None else min(length, self.counted)


def gather_for_metrics(value: Any, read: BatchRead, part: int, began: int = 0) -> Any:
    """The value with the rows of all data-parallel ranks, in the order of the data, and without repeats. Collective.

    ``value``: a tensor with a row for each sample of the batch, a structure of such tensors, or a list with an item for
    each sample. A tensor without dimensions counts as one row per rank. Tensor-parallel ranks give the same, which is
    taken once. Raises ``ValueError`` on every rank where rows are not samples, or differ in shape beyond the first dim,
    and ``RunRefused`` where ranks have taken their parts of different streams, which ``began`` is a digest of.
    """
    flat, form = pytree.tree_flatten(value)
    flat = [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in flat]
    tensors = bool(flat) and all(isinstance(leaf, Tensor) for leaf in flat)
    described = tuple((tuple(leaf.shape), leaf.dtype) for leaf in flat) if tensors else None
    told = world().gather(Told(part, read.size, read.counted, began, described))
    readers = {one.part: rank for rank, one in reversed(list(enumerate(told)))}  # the first rank of each part
    order = [readers[at] for at in sorted(readers)]
    _refuse(told, value, tensors=tensors)
    if not tensors:
        rows: Sequence[Any] = value
        everyone = world().gather(list(rows))
        return [row for rank in order for row in everyone[rank][: told[rank].kept(len(everyone[rank]))]]
    return pytree.tree_unflatten([_gathered(leaf, at, told, order) for at, leaf in enumerate(flat)], form)


def _refuse(told: list[Told], value: Any, *, tensors: bool) -> None:
    """The same on every rank, as all of it follows from what the ranks have told."""
    if all(one.began for one in told) and len({one.began for one in told}) > 1:
        what = "the stream gives each rank other samples, and each keeps its part of them: the rest is read by nobody"
        fix = "Write loaders=pk.data.KeepLoaders() where it splits itself by rank, or let it give all on every rank."
        raise refused("run.orders-apart", "gather_for_metrics", what, fix)
    if any((one.leaves is None) == tensors or len(one.leaves or ()) != len(told[0].leaves or ()) for one in told):
        raise refused("run.ranks-give", "gather_for_metrics", "ranks give values of different structure")
    if not tensors and (not isinstance(value, Sequence) or isinstance(value, str)):
        raise ValueError(f"gather_for_metrics takes tensors or a list with an item per sample, not {value!r:.80}")
    for rank, one in enumerate(told):
        for leaf, first in zip(one.leaves or (), told[0].leaves or (), strict=True):
            _refuse_leaf(rank, one.size, leaf, first)


def _refuse_leaf(rank: int, size: int | None, leaf: tuple[Any, ...], first: tuple[Any, ...]) -> None:
    """One rank's tensor against its batch, and against that of rank 0."""
    shape, dtype = leaf
    if shape and size is not None and shape[0] != size:
        what = f"rank {rank} gives gather_for_metrics a tensor of shape {shape} for a batch of {size} samples"
        raise ValueError(f"{what}; give it one row per sample, such as a loss with reduction='none'")
    if shape[1:] != first[0][1:] or len(shape) != len(first[0]) or dtype != first[1]:
        what = f"rank 0 gives shape {first[0]} of {first[1]}, rank {rank} {shape} of {dtype}"
        fix = "Pad them to one shape behind the first dimension."
        raise refused("run.ranks-give", "gather_for_metrics", what, fix)


def _gathered(leaf: Tensor, at: int, told: list[Told], order: list[int]) -> Tensor:
    rows = [(one.leaves[at][0] or (1,))[0] for one in told if one.leaves is not None]
    mine = leaf.detach().reshape(1) if leaf.dim() == 0 else leaf.detach()
    device = world().wire(mine.device)
    sent = mine.new_zeros((max(rows), *mine.shape[1:]), device=device)
    sent[: mine.shape[0]] = mine.to(device)
    everyone = world().parts(sent)
    return torch.cat([everyone[rank][: told[rank].kept(rows[rank])] for rank in order]).to(leaf.device)
