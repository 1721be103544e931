"""Which way a tensor goes from rank 0 to all: arithmetic on its placements, the mesh and a rank. No torch.

Rank 0's line is the narrow place, so each different part leaves it for one rank alone, the first that keeps it; where
several keep it, such as the replicas of an HSDP mesh, they hand it on in a binomial tree: who has it sends it to one
more in every round. Of shards rank 0 sends about the model once, and not once per rank or replica. What every rank
keeps goes to all in such a tree, and so does what would be cut into tiny parts: a message costs more than its bytes.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import prod

from attrs import evolve, frozen

from prepkit.plan.byte_ranges import Part, parts
from prepkit.plan.dtypes import itemsize
from prepkit.plan.layout import coordinate
from prepkit.steps import Axis, Transfer

ROOT = 0
"""The rank that has the values."""

TINY = 4096
"""Bytes: a tensor whose parts are no longer than this goes to every rank whole. gloo and NCCL take some ten
microseconds to start a message, in which as many bytes travel several times."""


@frozen(kw_only=True)
class Send:
    """One part on its way to one rank."""

    to: int
    box: tuple[Part, ...]
    """Of every dim of the whole tensor the slice that is sent; a scalar is sent as a tensor of one element."""


@frozen(kw_only=True)
class Grid:
    """The mesh as one tensor lies on it: axes that cut it, and axes along which ranks keep the same."""

    cuts: tuple[tuple[int, int], ...]
    """Of every axis that cuts: its size, and how far in rank neighbours on it are apart."""
    copies: tuple[tuple[int, int], ...]
    """Likewise of the other axes."""

    @property
    def pieces(self) -> int:
        """Into how many parts the tensor is cut."""
        return prod(size for size, _ in self.cuts)

    @property
    def replicas(self) -> int:
        """How many ranks keep each part."""
        return prod(size for size, _ in self.copies)


def grid(one: Transfer, axes: tuple[Axis, ...]) -> Grid:
    """How ``one`` lies on the mesh. An axis without a placement does not cut."""
    apart = tuple(prod(axis.size for axis in axes[place + 1 :]) for place in range(len(axes)))
    placed = (*one.placements, *("off-mesh",) * (len(axes) - len(one.placements)))[: len(axes)]
    cuts: list[tuple[int, int]] = []
    copies: list[tuple[int, int]] = []
    for axis, step, word in zip(axes, apart, placed, strict=True):
        (copies if word in ("replicate", "off-mesh") else cuts).append((axis.size, step))
    return Grid(cuts=tuple(cuts), copies=tuple(copies))


def goes_whole(one: Transfer, axes: tuple[Axis, ...]) -> bool:
    """Whether every rank gets all of it, and takes its part from that."""
    cut = grid(one, axes).pieces
    return cut == 1 or prod(one.shape) * itemsize(one.dtype) <= cut * TINY


def origin(one: Transfer, axes: tuple[Axis, ...], rank: int) -> int:
    """From whom ``rank`` gets what it is sent: rank 0, or one that is sent the same and gets it before.

    >>> mesh = (Axis(name="replicate", size=4), Axis(name="shard", size=2))
    >>> one = Transfer(name="w", dtype="float32", shape=(8192,), placements=("replicate", "shard(0)"))
    >>> [origin(one, mesh, rank) for rank in range(1, 8)]
    [0, 0, 1, 0, 1, 2, 3]
    """
    lies = _ways(one, axes)
    index = _index(rank, lies)
    return rank - _offset(index, lies) + _offset(_before(index), lies) if index else ROOT


def legs(one: Transfer, axes: tuple[Axis, ...], rank: int) -> tuple[Send, ...]:
    """What ``rank`` sends and to whom, in this order: rank 0 from the whole, others what they got themselves.

    >>> mesh = (Axis(name="replicate", size=4), Axis(name="shard", size=2))
    >>> one = Transfer(name="w", dtype="float32", shape=(8192,), placements=("replicate", "shard(0)"))
    >>> [[leg.to for leg in legs(one, mesh, rank)] for rank in range(8)]
    [[1, 2, 4], [3, 5], [6], [7], [], [], [], []]
    """
    return _legs(evolve(one, name=""), axes, rank, TINY)


@lru_cache(maxsize=16)
def _legs(one: Transfer, axes: tuple[Axis, ...], rank: int, tiny: int) -> tuple[Send, ...]:
    """Most tensors of a model have the shape of another, and rank 0 of thousands has as many legs."""
    del tiny
    lies, whole = _ways(one, axes), goes_whole(one, axes)
    to = _firsts(lies) if rank == ROOT else ()
    index = _index(rank, lies)
    base = rank - _offset(index, lies)
    to += tuple(base + _offset(later, lies) for later in _after(index, lies.replicas))
    every = tuple(Part(start=0, size=size) for size in one.shape or (1,))
    found = (Send(to=other, box=every if whole else box(one, axes, other)) for other in to)
    return tuple(leg for leg in found if all(part.size for part in leg.box))


def box(one: Transfer, axes: tuple[Axis, ...], rank: int) -> tuple[Part, ...]:
    """The part that ``rank`` keeps; of a scalar as of a tensor of one element."""
    return parts(one, axes, rank) if one.shape else (Part(start=0, size=1),)


def bytes_sent(one: Transfer, axes: tuple[Axis, ...]) -> int:
    """What rank 0 sends of ``one``.

    >>> one = Transfer(name="w", dtype="float32", shape=(4096, 3), placements=("shard(0)",))
    >>> bytes_sent(one, (Axis(name="shard", size=4),)) / (4096 * 3 * 4)
    0.75
    """
    return sum(prod(part.size for part in leg.box) for leg in legs(one, axes, ROOT)) * itemsize(one.dtype)


def _ways(one: Transfer, axes: tuple[Axis, ...]) -> Grid:
    """The grid on which it is sent: where it goes whole, no axis cuts."""
    return grid(evolve(one, placements=()) if goes_whole(one, axes) else one, axes)


def _firsts(lies: Grid) -> tuple[int, ...]:
    """Of each part but rank 0's own, the first rank that keeps it."""
    places = product(*(range(size) for size, _ in lies.cuts))
    ranks = (sum(at * step for at, (_, step) in zip(place, lies.cuts, strict=True)) for place in places)
    return tuple(ranks)[1:]


def _index(rank: int, lies: Grid) -> int:
    """Which of the ranks that keep the same part this one is; the first is 0."""
    index = 0
    for size, step in lies.copies:
        index = index * size + rank // step % size
    return index


def _offset(index: int, lies: Grid) -> int:
    """How far in rank the ``index``-th to keep a part is from the first."""
    sizes = tuple(Axis(name="", size=size) for size, _ in lies.copies)
    return sum(at * step for at, (_, step) in zip(coordinate(index, sizes), lies.copies, strict=True))


def _before(index: int) -> int:
    """Who of those that keep a part hands it to the ``index``-th."""
    return index - (1 << (index.bit_length() - 1))


def _after(index: int, count: int) -> tuple[int, ...]:
    """To whom of ``count`` the ``index``-th hands it, those first that have the most to hand on."""
    later = (index + (1 << turn) for turn in range(index.bit_length(), count.bit_length()))
    return tuple(other for other in later if other < count)
