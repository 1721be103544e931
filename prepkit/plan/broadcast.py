"""Which way a tensor goes from rank 0 to all ranks: arithmetic on its placements, the mesh and a rank. No torch.

Rank 0's network line is the narrow place, so every byte should leave it as few times as possible. A tensor goes in one
of two ways:

- *Shard by shard*: each distinct shard leaves rank 0 once, for the first rank that keeps it. Where several ranks keep
  the same shard, as the replicas of an HSDP mesh do, that first one hands it on down a binomial tree. So rank 0 sends
  about the model once, and not once per rank or per replica.
- *Whole*: what every rank keeps entirely goes down one binomial tree over all ranks. So does a tensor whose shards
  would be tiny, as starting a message costs more than its bytes; each rank then takes its shard from the whole.

In a *binomial tree* the number of ranks that have the bytes doubles in every round, since each of them sends to one
more. Eight ranks, of which the first has them at the start, are done after three rounds (log2 of 8), and rank 0 has
sent three times instead of seven::

    round 1   0 -> 1                                who gets it      0
    round 2   0 -> 2   1 -> 3                       from whom        +-- 1
    round 3   0 -> 4   1 -> 5   2 -> 6   3 -> 7                      |   +-- 3
                                                                     |   |   +-- 7
    In round r, rank i < 2**(r-1) sends to i + 2**(r-1):             |   +-- 5
    what a rank gets it gets from its own number                     +-- 2
    without the highest bit (6 = 0b110 from 2 = 0b010).              |   +-- 6
                                                                     +-- 4

A rank therefore only ever receives from a lower one, and from exactly one: nobody waits in a circle.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import prod

from attrs import evolve, frozen

from prepkit.plan.byte_ranges import Slice, local_slices
from prepkit.plan.layout import coordinate, itemsize
from prepkit.steps import Axis, Transfer

ROOT = 0
"""The rank that has the values."""

TINY = 4096
"""Bytes: a tensor whose shards are no longer than this goes to every rank whole. gloo and NCCL take some ten
microseconds to start a message, in which as many bytes travel several times."""


@frozen(kw_only=True)
class Send:
    """One message from one rank to another."""

    to: int
    """The rank that receives it."""
    slices: tuple[Slice, ...]
    """What of the whole tensor is sent, a slice per dim; a scalar is sent as a tensor of one element."""


@frozen(kw_only=True)
class Grid:
    """The mesh as one tensor lies on it: axes over which it is sharded, and axes along which ranks keep the same."""

    sharded: tuple[tuple[int, int], ...]
    """Of every axis that shards the tensor: its size, and how far apart in rank two neighbours on it are."""
    replicated: tuple[tuple[int, int], ...]
    """Likewise of the other axes."""

    @property
    def shards(self) -> int:
        """Into how many shards the tensor is divided."""
        return prod(size for size, _ in self.sharded)

    @property
    def replicas(self) -> int:
        """How many ranks keep each shard."""
        return prod(size for size, _ in self.replicated)


def grid(transfer: Transfer, axes: tuple[Axis, ...]) -> Grid:
    """Return how a tensor lies on the mesh. Along an axis without a placement it is replicated."""
    strides = tuple(prod(axis.size for axis in axes[index + 1 :]) for index in range(len(axes)))
    placements = (*transfer.placements, *("off-mesh",) * (len(axes) - len(transfer.placements)))[: len(axes)]
    sharded: list[tuple[int, int]] = []
    replicated: list[tuple[int, int]] = []
    for axis, stride, placement in zip(axes, strides, placements, strict=True):
        (replicated if placement in ("replicate", "off-mesh") else sharded).append((axis.size, stride))
    return Grid(sharded=tuple(sharded), replicated=tuple(replicated))


def sent_whole(transfer: Transfer, axes: tuple[Axis, ...]) -> bool:
    """Return whether every rank gets all of the tensor, and takes its shard from that."""
    shards = grid(transfer, axes).shards
    return shards == 1 or prod(transfer.shape) * itemsize(transfer.dtype) <= shards * TINY


def source_rank(transfer: Transfer, axes: tuple[Axis, ...], rank: int) -> int:
    """From whom ``rank`` gets what it is sent: rank 0, or one that is sent the same and gets it before.

    >>> mesh = (Axis(name="replicate", size=4), Axis(name="shard", size=2))
    >>> weight = Transfer(name="w", dtype="float32", shape=(8192,), placements=("replicate", "shard(0)"))
    >>> [source_rank(weight, mesh, rank) for rank in range(1, 8)]
    [0, 0, 1, 0, 1, 2, 3]
    """
    lies = _sending_grid(transfer, axes)
    replica = _replica(rank, lies)
    if not replica:  # the first that keeps this shard
        return ROOT
    return rank - _rank_offset(replica, lies) + _rank_offset(_parent(replica), lies)


def sends(transfer: Transfer, axes: tuple[Axis, ...], rank: int) -> tuple[Send, ...]:
    """What ``rank`` sends, in this order: rank 0 from the whole tensor, the others what they received themselves.

    Nothing is sent to a rank whose shard is empty.

    >>> mesh = (Axis(name="replicate", size=4), Axis(name="shard", size=2))
    >>> weight = Transfer(name="w", dtype="float32", shape=(8192,), placements=("replicate", "shard(0)"))
    >>> [[send.to for send in sends(weight, mesh, rank)] for rank in range(8)]
    [[1, 2, 4], [3, 5], [6], [7], [], [], [], []]
    """
    return _sends(evolve(transfer, name=""), axes, rank, TINY)


@lru_cache(maxsize=16)
def _sends(transfer: Transfer, axes: tuple[Axis, ...], rank: int, tiny: int) -> tuple[Send, ...]:
    """Cached without the name: most tensors of a model have another's shape, and rank 0 of thousands sends as often."""
    del tiny  # a key of the cache: what is small enough to go whole depends on it
    lies, whole = _sending_grid(transfer, axes), sent_whole(transfer, axes)
    receivers = _first_keepers(lies) if rank == ROOT else ()
    replica = _replica(rank, lies)
    first = rank - _rank_offset(replica, lies)
    receivers += tuple(first + _rank_offset(child, lies) for child in _children(replica, lies.replicas))
    everything = tuple(Slice(start=0, size=size) for size in transfer.shape or (1,))
    messages = (
        Send(to=receiver, slices=everything if whole else kept_slices(transfer, axes, receiver))
        for receiver in receivers
    )
    return tuple(send for send in messages if all(part.size for part in send.slices))


def kept_slices(transfer: Transfer, axes: tuple[Axis, ...], rank: int) -> tuple[Slice, ...]:
    """Return what of the tensor ``rank`` keeps, a slice per dim; of a scalar as of a tensor of one element."""
    return local_slices(transfer, axes, rank) if transfer.shape else (Slice(start=0, size=1),)


def bytes_sent(transfer: Transfer, axes: tuple[Axis, ...]) -> int:
    """Return what rank 0 sends of one tensor, in bytes.

    >>> weight = Transfer(name="w", dtype="float32", shape=(4096, 3), placements=("shard(0)",))
    >>> bytes_sent(weight, (Axis(name="shard", size=4),)) / (4096 * 3 * 4)
    0.75
    """
    elements = sum(prod(part.size for part in send.slices) for send in sends(transfer, axes, ROOT))
    return elements * itemsize(transfer.dtype)


def _sending_grid(transfer: Transfer, axes: tuple[Axis, ...]) -> Grid:
    """The grid for the way it is sent: one that goes whole is replicated over all axes, however it is kept."""
    return grid(evolve(transfer, placements=()) if sent_whole(transfer, axes) else transfer, axes)


def _first_keepers(lies: Grid) -> tuple[int, ...]:
    """Of each shard but rank 0's own, the lowest rank that keeps it."""
    coordinates = product(*(range(size) for size, _ in lies.sharded))
    ranks = (
        sum(index * stride for index, (_, stride) in zip(coordinate, lies.sharded, strict=True))
        for coordinate in coordinates
    )
    return tuple(ranks)[1:]


# --- the binomial tree over the ranks that keep the same shard -------------------------------------------------------
# Its nodes are replica numbers: 0 for the lowest rank that keeps the shard, 1 for the next one, and so on.


def _replica(rank: int, lies: Grid) -> int:
    """Return which of the ranks that keep its shard this one is."""
    replica = 0
    for size, stride in lies.replicated:
        replica = replica * size + rank // stride % size
    return replica


def _rank_offset(replica: int, lies: Grid) -> int:
    """Return how far in rank a replica is from the first one that keeps the shard."""
    axes = tuple(Axis(name="", size=size) for size, _ in lies.replicated)
    return sum(index * stride for index, (_, stride) in zip(coordinate(replica, axes), lies.replicated, strict=True))


def _parent(replica: int) -> int:
    """The replica that hands the shard to this one: its number without the highest bit."""
    return replica - (1 << (replica.bit_length() - 1))


def _children(replica: int, count: int) -> tuple[int, ...]:
    """The replicas, of ``count``, that this one hands the shard to: in the order of rounds, the largest subtree first.

    A replica that got it in round r sends in the rounds after r, in round q to the one that is 2**(q-1) further on.
    """
    children = (replica + (1 << turn) for turn in range(replica.bit_length(), count.bit_length()))
    return tuple(child for child in children if child < count)
