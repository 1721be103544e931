"""Which bytes of a file a rank reads: arithmetic on a source, the mesh and a rank. No torch, no file.

A rank's shard has the shape that ``layout.local_shape`` gives: a dim is divided as ``torch.chunk`` does. Of a tensor
that is sharded along dim 0 such a shard is one range of bytes; along another dim it is a range for every row.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from attrs import frozen

from prepkit.plan.dtypes import itemsize
from prepkit.plan.layout import chunk, coordinate, sharded_dim
from prepkit.steps import Axis, Chunk, FileSlice, Transfer


@frozen(kw_only=True)
class Slice:
    """A run of indices along one dim of a tensor."""

    start: int
    size: int


@frozen(kw_only=True)
class Range:
    """Consecutive bytes of a file."""

    start: int
    length: int


def local_slices(tensor: FileSlice | Transfer, axes: tuple[Axis, ...], rank: int) -> tuple[Slice, ...]:
    """What of the whole tensor ``rank`` keeps, a slice per dim. Placements are those of ``ParamLayout``.

    What is strided is divided last, whatever its axis: ``fully_shard`` divides what another axis has divided already.

    >>> source = FileSlice(name="w", key="w", file=0, start=100, dtype="float32", shape=(5, 3),
    ...                    placements=("shard(0)",))
    >>> local_slices(source, (Axis(name="shard", size=4),), 2)
    (Slice(start=4, size=1), Slice(start=0, size=3))
    """
    slices = [Slice(start=0, size=size) for size in tensor.shape]
    shardings = zip(tensor.placements, axes, coordinate(rank, axes), strict=False)
    for placement, axis, index in sorted(shardings, key=lambda sharding: sharding[0].startswith("strided")):
        dim = sharded_dim(placement)
        if dim is not None:
            before = slices[dim]
            first, rows = chunk(before.size, axis.size, index)
            slices[dim] = Slice(start=before.start + first, size=rows)
    return tuple(slices)


def filled_slices(source: FileSlice, axes: tuple[Axis, ...], rank: int) -> tuple[Slice, ...]:
    """Which part of the rank's own shard the source's chunk fills: slices of the shard, empty where they do not meet.

    >>> chunk = Chunk(offsets=(3, 0), sizes=(2, 3))
    >>> source = FileSlice(name="w", key="w", file=0, start=100, dtype="float32", shape=(5, 3),
    ...                    placements=("shard(0)",), chunk=chunk)
    >>> [filled_slices(source, (Axis(name="shard", size=4),), rank)[0] for rank in (0, 1, 2)]
    [Slice(start=0, size=0), Slice(start=1, size=1), Slice(start=0, size=1)]
    """
    shard = local_slices(source, axes, rank)
    return tuple(
        Slice(start=common.start - kept.start if common.size else 0, size=common.size)
        for kept, common in zip(shard, _overlap(source, shard), strict=True)
    )


def _overlap(source: FileSlice, shard: tuple[Slice, ...]) -> tuple[Slice, ...]:
    """What a shard and the source's chunk have in common, as slices of the whole tensor."""
    if source.chunk is None:
        return shard
    overlap = []
    for kept, offset, size in zip(shard, source.chunk.offsets, source.chunk.sizes, strict=True):
        first, last = max(kept.start, offset), min(kept.start + kept.size, offset + size)
        overlap.append(Slice(start=first, size=max(last - first, 0)))
    return tuple(overlap)


def ranges(source: FileSlice, axes: tuple[Axis, ...], rank: int) -> tuple[Range, ...]:
    """The bytes that ``rank`` reads, in the row-major order of its shard; none for an empty one.

    >>> source = FileSlice(name="w", key="w", file=0, start=100, dtype="float32", shape=(5, 3),
    ...                    placements=("shard(0)",))
    >>> [ranges(source, (Axis(name="shard", size=4),), rank) for rank in (0, 2, 3)]
    [(Range(start=100, length=24),), (Range(start=148, length=12),), ()]
    """
    slices, shape = _overlap(source, local_slices(source, axes, rank)), source.shape
    if not all(part.size for part in slices):
        return ()
    if source.chunk is not None:
        shape = source.chunk.sizes
        slices = tuple(
            Slice(start=part.start - offset, size=part.size)
            for part, offset in zip(slices, source.chunk.offsets, strict=True)
        )
    item = itemsize(source.dtype)
    partial = [dim for dim, part in enumerate(slices) if part.size < shape[dim]]
    inner = partial[-1] if partial else 0  # below this dim everything is read, so a run of it is consecutive
    row = prod(shape[inner + 1 :]) * item
    length = (slices[inner].size if slices else 1) * row
    offset = (slices[inner].start if slices else 0) * row
    return tuple(
        Range(start=source.start + position * prod(shape[inner:]) * item + offset, length=length)
        for position in _positions(slices[:inner], shape[:inner])
    )


def _positions(outer: tuple[Slice, ...], shape: tuple[int, ...]) -> Iterator[int]:
    """Row-major positions, among the indices of the outer dims, of those that the slices keep."""
    if not outer:
        yield 0
        return
    for position in _positions(outer[:-1], shape[:-1]):
        first = position * shape[-1] + outer[-1].start
        yield from range(first, first + outer[-1].size)


def complete(sources: tuple[FileSlice, ...]) -> frozenset[str]:
    """Names of the tensors of which every element is in some source.

    >>> top = FileSlice(name="w", key="top", file=0, start=0, dtype="int8", shape=(2, 3),
    ...              chunk=Chunk(offsets=(0, 0), sizes=(1, 3)))
    >>> low = FileSlice(name="w", key="low", file=0, start=3, dtype="int8", shape=(2, 3),
    ...              chunk=Chunk(offsets=(1, 0), sizes=(1, 3)))
    >>> complete((top,)), complete((top, low))
    (frozenset(), frozenset({'w'}))
    """
    chunks: dict[str, set[Chunk]] = {}
    shapes = {source.name: source.shape for source in sources}
    for source in sources:
        everything = Chunk(offsets=(0,) * len(source.shape), sizes=source.shape)
        chunks.setdefault(source.name, set()).add(source.chunk or everything)
    return frozenset(
        name for name, blocks in chunks.items() if sum(prod(block.sizes) for block in blocks) >= prod(shapes[name])
    )


def bytes_read(sources: tuple[FileSlice, ...], axes: tuple[Axis, ...], rank: int) -> int:
    """Bytes that ``rank`` reads in all."""
    return sum(part.length for source in sources for part in ranges(source, axes, rank))
