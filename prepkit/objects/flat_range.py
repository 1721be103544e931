"""A run of a tensor's elements, in the order of its rows, as torch's distributed checkpoints know tensors: in boxes.

ZeRO gives every rank such a run of each parameter. A checkpoint holds boxes (offsets and sizes per dim), so that what
any engine has cut fits any other; a run of a row-major tensor is a few boxes, and each of them is a view of the run.
torch's checkpoints are imported by what they call here, which is late: a run that saves nothing does not pay for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from attrs import frozen

Box = tuple[tuple[int, ...], tuple[int, ...], int]
"""Offsets, sizes, and which element of the run is its first."""


@frozen(eq=False, repr=False)
class FlatRange:
    """Elements ``start`` to ``start + len(values)`` of a tensor of this shape. torch's ``_Checkpointable`` protocol."""

    values: torch.Tensor
    """One-dimensional; a view of what the engine holds, so that reading into it is reading into the engine."""
    start: int
    shape: tuple[int, ...]
    """Of the whole tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return self.values.dtype

    def staged(self) -> FlatRange:
        """A copy in host memory, which training does not change."""
        return FlatRange(self.values.detach().to("cpu", copy=True), self.start, self.shape)

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        """One item per box."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)),
                    properties=TensorProperties.create_from_tensor(self.values),
                    size=torch.Size(self.shape),
                ),
            )
            for offsets, sizes, _ in self._boxes()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        """The boxes that are to be filled."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            for offsets, sizes, _ in self._boxes()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """The view of the run that is the box at these offsets. Raises ``ValueError`` where there is none."""
        for offsets, sizes, first in self._boxes():
            if tuple(index.offset or (0,) * len(self.shape)) == offsets:
                return self.values[first : first + prod(sizes)].view(sizes)
        raise ValueError(f"{index.fqn} has no box at {index.offset}")

    def _boxes(self) -> list[Box]:
        return list(boxes(self.shape, self.start, self.start + self.values.numel()))


def boxes(shape: tuple[int, ...], first: int, last: int) -> Iterator[Box]:
    """The boxes that hold elements ``first`` to ``last`` of a row-major tensor, in their order.

    >>> [box[:2] for box in boxes((4, 3), 2, 10)]
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    >>> list(boxes((), 0, 1))
    [((), (), 0)]
    """
    done = first
    while done < last:
        dim, inner = _widest(shape, done, last)
        count = 1 if dim < 0 else min((last - done) // inner, shape[dim] - (done // inner) % shape[dim])
        offsets = _place(shape, done)
        sizes = tuple(1 if at < dim else count if at == dim else size for at, size in enumerate(shape))
        yield offsets, sizes, done - first
        done += count * inner


def _widest(shape: tuple[int, ...], start: int, last: int) -> tuple[int, int]:
    """The outermost dim along which whole slices lie between the two elements, and the elements of one slice."""
    dim, inner = len(shape) - 1, 1
    while dim > 0 and start % (inner * shape[dim]) == 0 and start + inner * shape[dim] <= last:
        inner *= shape[dim]
        dim -= 1
    return dim, inner


def _place(shape: tuple[int, ...], element: int) -> tuple[int, ...]:
    """The index of an element."""
    index: list[int] = []
    for size in reversed(shape):
        element, at = divmod(element, size)
        index.append(at)
    return tuple(reversed(index))
