"""Which bytes of a file a rank reads: arithmetic on a source, the mesh and a rank. No torch, no file.

A rank's shard has the shape that ``layout.local_shape`` gives: a dim is divided as ``torch.chunk`` does. Of a tensor
that is sharded along dim 0 such a shard is one range of bytes; along another dim it is a range for every row.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from attrs import frozen

from prepkit.plan.layout import chunk, coordinate, itemsize, sharded_dim
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
    """Return what of the whole tensor ``rank`` keeps, a slice per dim. Placements are those of ``ParamLayout``.

    Of what lies in a flat parameter a slice of its elements in a row.
    What is strided is divided last, whatever its axis: ``fully_shard`` divides what another axis has divided already.

    >>> source = FileSlice(name="w", key="w", file=0, start=100, dtype="float32", shape=(5, 3),
    ...                    placements=("shard(0)",))
    >>> local_slices(source, (Axis(name="shard", size=4),), 2)
    (Slice(start=4, size=1), Slice(start=0, size=3))
    """
    if tensor.flat is not None:
        first, last = flat_range(tensor, axes, rank)
        return (Slice(start=first, size=last - first),)
    slices = [Slice(start=0, size=size) for size in tensor.shape]
    shardings = zip(tensor.placements, axes, coordinate(rank, axes), strict=False)
    for placement, axis, index in sorted(shardings, key=lambda sharding: sharding[0].startswith("strided")):
        dim = sharded_dim(placement)
        if dim is not None:
            before = slices[dim]
            first, rows = chunk(before.size, axis.size, index)
            slices[dim] = Slice(start=before.start + first, size=rows)
    return tuple(slices)


def flat_range(tensor: FileSlice | Transfer, axes: tuple[Axis, ...], rank: int) -> tuple[int, int]:
    """First and one past the last of the elements, in a row, that ``rank`` holds of what lies in a flat parameter.

    >>> from prepkit.steps import FlatPlace
    >>> place = FlatPlace(start=4, shard=6, axis="shard")
    >>> source = FileSlice(name="w", key="w", file=0, start=100, dtype="float32", shape=(5, 3), flat=place)
    >>> [flat_range(source, (Axis(name="shard", size=4),), rank) for rank in range(4)]
    [(0, 2), (2, 8), (8, 14), (14, 15)]
    """
    numel, place = prod(tensor.shape), tensor.flat
    if place is None or not place.axis:
        return 0, numel
    index = next(at for axis, at in zip(axes, coordinate(rank, axes), strict=True) if axis.name == place.axis)
    first, last = (min(max(edge * place.shard - place.start, 0), numel) for edge in (index, index + 1))
    return first, last


@frozen(kw_only=True)
class BoxRead:
    """What a rank reads of one source into one box of its own part."""

    offset: int | None
    """Where the box begins in the rank's row of elements; None: the part has the tensor's dims, and is the box."""
    box: tuple[int, ...]
    """Sizes of the box."""
    filled: tuple[Slice, ...]
    """Which part of the box is read."""
    ranges: tuple[Range, ...]
    """Its bytes, in row-major order."""


def reads(source: FileSlice, axes: tuple[Axis, ...], rank: int) -> tuple[BoxRead, ...]:
    """Return what ``rank`` reads, box by box: a shard of dims is one, a run of elements a few (``boxes``).

    >>> from prepkit.steps import FlatPlace
    >>> place = FlatPlace(start=4, shard=6, axis="shard")
    >>> source = FileSlice(name="w", key="w", file=0, start=100, dtype="float32", shape=(5, 3), flat=place)
    >>> found = reads(source, (Axis(name="shard", size=4),), 1)
    >>> [(read.offset, read.box, read.ranges[0].start, read.ranges[0].length) for read in found]
    [(0, (1, 1), 108, 4), (1, (1, 3), 112, 12), (4, (1, 2), 124, 8)]
    """
    if source.flat is None:
        kept = local_slices(source, axes, rank)
        sizes = tuple(part.size for part in kept)
        return (
            BoxRead(offset=None, box=sizes, filled=filled_slices(source, axes, rank), ranges=_ranges(source, kept)),
        )
    first, last = flat_range(source, axes, rank)
    found, offset = [], 0
    for box in boxes(source.shape, first, last):
        sizes = tuple(part.size for part in box)
        found.append(BoxRead(offset=offset, box=sizes, filled=_inside(source, box), ranges=_ranges(source, box)))
        offset += prod(sizes)
    return tuple(found)


def boxes(shape: tuple[int, ...], first: int, last: int) -> tuple[tuple[Slice, ...], ...]:
    """The elements from ``first`` to before ``last`` of a row-major tensor, as boxes in that order: a slice per dim.

    A row that is begun, the rows that are whole, a row that is not ended; the first and the third alike inside.

    >>> [[(part.start, part.size) for part in box] for box in boxes((5, 3), 2, 8)]
    [[(0, 1), (2, 1)], [(1, 1), (0, 3)], [(2, 1), (0, 2)]]
    """
    if first >= last:
        return ()
    if len(shape) <= 1:
        return ((Slice(start=first, size=last - first),) if shape else (),)
    row = prod(shape[1:])
    (top, begun), (bottom, ended) = divmod(first, row), divmod(last, row)
    if top == bottom:
        return _in_row(shape, top, begun, ended)
    whole = top + (begun > 0)
    found = _in_row(shape, top, begun, row) if begun else ()
    if whole < bottom:
        rest = tuple(Slice(start=0, size=size) for size in shape[1:])
        found += ((Slice(start=whole, size=bottom - whole), *rest),)
    return found + (_in_row(shape, bottom, 0, ended) if ended else ())


def _in_row(shape: tuple[int, ...], index: int, first: int, last: int) -> tuple[tuple[Slice, ...], ...]:
    return tuple((Slice(start=index, size=1), *box) for box in boxes(shape[1:], first, last))


def filled_slices(source: FileSlice, axes: tuple[Axis, ...], rank: int) -> tuple[Slice, ...]:
    """Which part of the rank's own shard the source's chunk fills: slices of the shard, empty where they do not meet.

    >>> chunk = Chunk(offsets=(3, 0), sizes=(2, 3))
    >>> source = FileSlice(name="w", key="w", file=0, start=100, dtype="float32", shape=(5, 3),
    ...                    placements=("shard(0)",), chunk=chunk)
    >>> [filled_slices(source, (Axis(name="shard", size=4),), rank)[0] for rank in (0, 1, 2)]
    [Slice(start=0, size=0), Slice(start=1, size=1), Slice(start=0, size=1)]
    """
    return _inside(source, local_slices(source, axes, rank))


def _inside(source: FileSlice, shard: tuple[Slice, ...]) -> tuple[Slice, ...]:
    """Return what of a box of the tensor the source's chunk fills."""
    return tuple(
        Slice(start=common.start - kept.start if common.size else 0, size=common.size)
        for kept, common in zip(shard, _overlap(source, shard), strict=True)
    )


def _overlap(source: FileSlice, shard: tuple[Slice, ...]) -> tuple[Slice, ...]:
    """Return what a shard and the source's chunk have in common, as slices of the whole tensor."""
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
    return tuple(part for read in reads(source, axes, rank) for part in read.ranges)


def _ranges(source: FileSlice, box: tuple[Slice, ...]) -> tuple[Range, ...]:
    """The bytes of what the source's chunk fills of a box of the tensor."""
    slices, shape = _overlap(source, box), source.shape
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
