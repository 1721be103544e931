"""Which bytes of a file a rank reads: arithmetic on a source, the mesh and a rank. No torch, no file.

The parts are those that ``layout.local_shape`` gives: dim 0 is cut as ``torch.chunk`` does. Such a part is one range
of bytes; of a tensor that is cut along another dim a range for every row.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from attrs import frozen

from prepkit.plan.dtypes import itemsize
from prepkit.plan.layout import chunk, coordinate, sharded_dim
from prepkit.steps import Axis, Chunk, FileSlice, Transfer


@frozen(kw_only=True)
class Part:
    """The slice of one dim that a rank holds."""

    start: int
    size: int


@frozen(kw_only=True)
class Range:
    """Consecutive bytes of a file."""

    start: int
    length: int


def parts(source: FileSlice | Transfer, axes: tuple[Axis, ...], rank: int) -> tuple[Part, ...]:
    """The slice of every dim that ``rank`` holds. Placements are those of ``ParamLayout``.

    What is strided is cut last, whatever its axis: ``fully_shard`` cuts what another axis has cut already.

    >>> source = FileSlice(name="w", key="w", file=0, start=100, dtype="float32", shape=(5, 3),
    ...                    placements=("shard(0)",))
    >>> parts(source, (Axis(name="shard", size=4),), 2)
    (Part(start=4, size=1), Part(start=0, size=3))
    """
    found = [Part(start=0, size=size) for size in source.shape]
    cuts = zip(source.placements, axes, coordinate(rank, axes), strict=False)
    for placement, axis, index in sorted(cuts, key=lambda cut: cut[0].startswith("strided")):
        dim = sharded_dim(placement)
        if dim is not None:
            first, rows = chunk(found[dim].size, axis.size, index)
            found[dim] = Part(start=found[dim].start + first, size=rows)
    return tuple(found)


def held(source: FileSlice, axes: tuple[Axis, ...], rank: int) -> tuple[Part, ...]:
    """What of the rank's part the source's block is: a slice of every dim of the part, empty where they do not meet.

    >>> block = Chunk(offsets=(3, 0), sizes=(2, 3))
    >>> source = FileSlice(name="w", key="w", file=0, start=100, dtype="float32", shape=(5, 3),
    ...                    placements=("shard(0)",), chunk=block)
    >>> [held(source, (Axis(name="shard", size=4),), rank)[0] for rank in (0, 1, 2)]
    [Part(start=0, size=0), Part(start=1, size=1), Part(start=0, size=1)]
    """
    mine = parts(source, axes, rank)
    return tuple(
        Part(start=common.start - part.start if common.size else 0, size=common.size)
        for part, common in zip(mine, _common(source, mine), strict=True)
    )


def _common(source: FileSlice, mine: tuple[Part, ...]) -> tuple[Part, ...]:
    """What a part and the source's block have in common, in the whole tensor."""
    if source.chunk is None:
        return mine
    found = []
    for part, start, size in zip(mine, source.chunk.offsets, source.chunk.sizes, strict=True):
        first, last = max(part.start, start), min(part.start + part.size, start + size)
        found.append(Part(start=first, size=max(last - first, 0)))
    return tuple(found)


def ranges(source: FileSlice, axes: tuple[Axis, ...], rank: int) -> tuple[Range, ...]:
    """The bytes that ``rank`` reads, in the row-major order of its part; none for an empty part.

    >>> source = FileSlice(name="w", key="w", file=0, start=100, dtype="float32", shape=(5, 3),
    ...                    placements=("shard(0)",))
    >>> [ranges(source, (Axis(name="shard", size=4),), rank) for rank in (0, 2, 3)]
    [(Range(start=100, length=24),), (Range(start=148, length=12),), ()]
    """
    mine = _common(source, parts(source, axes, rank))
    if not all(part.size for part in mine):
        return ()
    shape = source.shape
    if source.chunk is not None:
        shape = source.chunk.sizes
        mine = tuple(
            Part(start=part.start - start, size=part.size)
            for part, start in zip(mine, source.chunk.offsets, strict=True)
        )
    item = itemsize(source.dtype)
    cut = [dim for dim, part in enumerate(mine) if part.size < shape[dim]]
    inner = cut[-1] if cut else 0  # below this dim everything is whole, so a run of it is consecutive
    row = prod(shape[inner + 1 :]) * item
    length = (mine[inner].size if mine else 1) * row
    offset = (mine[inner].start if mine else 0) * row
    return tuple(
        Range(start=source.start + place * prod(shape[inner:]) * item + offset, length=length)
        for place in _places(mine[:inner], shape[:inner])
    )


def _places(outer: tuple[Part, ...], shape: tuple[int, ...]) -> Iterator[int]:
    """Row-major positions, in the whole, of the rows that the outer dims keep."""
    if not outer:
        yield 0
        return
    for place in _places(outer[:-1], shape[:-1]):
        yield from range(place * shape[-1] + outer[-1].start, place * shape[-1] + outer[-1].start + outer[-1].size)


def complete(sources: tuple[FileSlice, ...]) -> frozenset[str]:
    """Names of the tensors of which every element is in some source.

    >>> top = FileSlice(name="w", key="top", file=0, start=0, dtype="int8", shape=(2, 3),
    ...              chunk=Chunk(offsets=(0, 0), sizes=(1, 3)))
    >>> low = FileSlice(name="w", key="low", file=0, start=3, dtype="int8", shape=(2, 3),
    ...              chunk=Chunk(offsets=(1, 0), sizes=(1, 3)))
    >>> complete((top,)), complete((top, low))
    (frozenset(), frozenset({'w'}))
    """
    blocks: dict[str, set[Chunk]] = {}
    shapes = {source.name: source.shape for source in sources}
    for source in sources:
        whole = Chunk(offsets=(0,) * len(source.shape), sizes=source.shape)
        blocks.setdefault(source.name, set()).add(source.chunk or whole)
    return frozenset(
        name for name, some in blocks.items() if sum(prod(one.sizes) for one in some) >= prod(shapes[name])
    )


def bytes_read(sources: tuple[FileSlice, ...], axes: tuple[Axis, ...], rank: int) -> int:
    """Bytes that ``rank`` reads in all."""
    return sum(part.length for source in sources for part in ranges(source, axes, rank))
