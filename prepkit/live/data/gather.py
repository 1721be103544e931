"""Values of all ranks together, each sample once: for metrics over an evaluation set (behaviour DL-27)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from prepkit.live.data.streams import BatchRead


@frozen
class Told:
    """What one rank says of its value before it is gathered."""

    part: int
    size: int | None
    counted: int | None
    leaves: tuple[tuple[Any, ...], ...] | None
    """Shape and dtype of each tensor; None: the value is no structure of tensors."""

    def kept(self, length: int) -> int:
        """How many of so many rows are no repeats."""
        return length if self.counted is None else min(length, self.counted)


def gather_for_metrics(value: Any, read: BatchRead, part: int) -> Any:
    """The value with the rows of all data-parallel ranks, in the order of the data, and without repeats. Collective.

    ``value``: a tensor with a row for each sample of the batch, a structure of such tensors, or a list with an item for
    each sample. A tensor without dimensions counts as one row per rank. Tensor-parallel ranks give the same, which is
    taken once. Raises ``ValueError`` on every rank where rows are not samples, or differ in shape beyond the first dim.
    """
    flat, form = pytree.tree_flatten(value)
    flat = [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in flat]
    tensors = bool(flat) and all(isinstance(leaf, Tensor) for leaf in flat)
    described = tuple((tuple(leaf.shape), leaf.dtype) for leaf in flat) if tensors else None
    told = _exchanged(Told(part, read.size, read.counted, described))
    readers = {one.part: rank for rank, one in reversed(list(enumerate(told)))}  # the first rank of each part
    order = [readers[at] for at in sorted(readers)]
    _refuse(told, value, tensors=tensors)
    if not tensors:
        rows: Sequence[Any] = value
        everyone = _exchanged(list(rows))
        return [row for rank in order for row in everyone[rank][: told[rank].kept(len(everyone[rank]))]]
    return pytree.tree_unflatten([_gathered(leaf, at, told, order) for at, leaf in enumerate(flat)], form)


def _exchanged(mine: Any) -> list[Any]:
    if not dist.is_initialized():
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _refuse(told: list[Told], value: Any, *, tensors: bool) -> None:
    """The same on every rank, as all of it follows from what the ranks have told."""
    if any((one.leaves is None) == tensors or len(one.leaves or ()) != len(told[0].leaves or ()) for one in told):
        raise ValueError("the ranks give values of different structure to gather_for_metrics")
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
        what = f"rank 0 gives gather_for_metrics shape {first[0]} of {first[1]}, rank {rank} {shape} of {dtype}"
        raise ValueError(f"{what}; pad them to one shape behind the first dimension")


def _gathered(leaf: Tensor, at: int, told: list[Told], order: list[int]) -> Tensor:
    rows = [(one.leaves[at][0] or (1,))[0] for one in told if one.leaves is not None]
    mine = leaf.detach().reshape(1) if leaf.dim() == 0 else leaf.detach()
    if not dist.is_initialized():
        return mine[: told[0].kept(rows[0])]
    device = travels_on(mine)
    sent = mine.new_zeros((max(rows), *mine.shape[1:]), device=device)
    sent[: mine.shape[0]] = mine.to(device)
    everyone = [torch.empty_like(sent) for _ in told]
    dist.all_gather(everyone, sent)
    return torch.cat([everyone[rank][: told[rank].kept(rows[rank])] for rank in order]).to(leaf.device)


def travels_on(tensor: Tensor) -> torch.device:
    """Where the default group can send it: NCCL takes no tensor of the host."""
    if tensor.device.type != "cpu" or "gloo" in str(dist.get_backend_config()) or not torch.accelerator.is_available():
        return tensor.device
    kind = torch.accelerator.current_accelerator()
    assert kind is not None, "there is an accelerator"
    return torch.device(kind.type, torch.accelerator.current_device_index())
