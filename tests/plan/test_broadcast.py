"""The ways that a tensor takes from rank 0: every rank gets exactly the shard that the plan gives it, and once."""

from __future__ import annotations

import re
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepkit.plan import broadcast
from prepkit.plan.broadcast import ROOT, TINY, bytes_sent, kept_slices, sends, sent_whole, source_rank
from prepkit.plan.byte_ranges import Slice, local_slices
from prepkit.plan.layout import itemsize
from prepkit.steps import Axis, Transfer

PLACEMENTS = ("replicate", "off-mesh", "shard(0)", "shard(1)", "shard(2)", "strided(0)")


@st.composite
def transfers(draw: st.DrawFn, longest: int = 9) -> tuple[Transfer, tuple[Axis, ...]]:
    """A tensor of up to three dims, some empty, on a mesh of up to three axes, sharded along dims that it has."""
    shape = tuple(draw(st.lists(st.integers(0, longest), max_size=3)))
    axes = tuple(Axis(name=f"axis {place}", size=draw(st.integers(1, 5))) for place in range(draw(st.integers(0, 3))))
    able = [word for word in PLACEMENTS if "(" not in word or int(word[-2]) < len(shape)]
    placements = tuple(draw(st.sampled_from(able)) for _ in axes) if draw(st.booleans()) else ()
    dtype = draw(st.sampled_from(("float32", "bfloat16", "int64", "bool", "complex64")))
    return Transfer(name="w", dtype=dtype, shape=shape, placements=placements), axes


def keepers(transfer: Transfer, axes: tuple[Axis, ...]) -> dict[int, tuple[Slice, ...]]:
    """Rank to what it is to get, of those that get anything."""
    whole = tuple(Slice(start=0, size=size) for size in transfer.shape or (1,))
    all_get = whole if sent_whole(transfer, axes) else None
    every = {rank: all_get or kept_slices(transfer, axes, rank) for rank in range(prod(axis.size for axis in axes))}
    return {rank: kept for rank, kept in every.items() if all(part.size for part in kept)}


@given(transfers())
def test_every_rank_gets_exactly_its_part_and_gets_it_once_from_one_that_has_it(
    case: tuple[Transfer, tuple[Axis, ...]],
) -> None:
    transfer, axes = case
    kept = keepers(transfer, axes)
    world = prod(axis.size for axis in axes)
    arrived = {ROOT}
    for rank in range(world):  # nobody gets its part from a rank behind it
        for send in sends(transfer, axes, rank):
            assert rank in arrived, f"{rank} sends what it has not got"
            assert send.to not in arrived, f"{send.to} gets its shard twice"
            assert source_rank(transfer, axes, send.to) == rank
            assert send.slices == kept[send.to]
            assert rank == ROOT or send.slices == kept[rank]
            arrived.add(send.to)
    assert arrived == {ROOT} | kept.keys()


@given(transfers())
def test_a_part_leaves_rank_0_once_however_many_keep_it_but_for_its_own(
    case: tuple[Transfer, tuple[Axis, ...]],
) -> None:
    transfer, axes = case
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(broadcast, "TINY", 0)
        lies, world = broadcast.grid(transfer, axes), prod(axis.size for axis in axes)
        assert lies.shards * lies.replicas == world
        rounds = (lies.replicas - 1).bit_length()
        sizes = {send.to: prod(part.size for part in send.slices) for send in sends(transfer, axes, ROOT)}
        assert len(sizes) <= lies.shards - 1 + rounds
        assert all(len(sends(transfer, axes, rank)) <= rounds for rank in range(1, world))
        assert bytes_sent(transfer, axes) == sum(sizes.values()) * itemsize(transfer.dtype)
        mine = kept_slices(transfer, axes, ROOT)
        others = sum(size for to, size in sizes.items() if kept_slices(transfer, axes, to) != mine)
        assert others == prod(transfer.shape) - prod(part.size for part in mine)


@given(transfers(longest=200))
def test_what_is_replicated_or_in_tiny_shards_goes_whole_and_nothing_else(
    case: tuple[Transfer, tuple[Axis, ...]],
) -> None:
    transfer, axes = case
    size = prod(transfer.shape) * itemsize(transfer.dtype)
    shards, world = broadcast.grid(transfer, axes).shards, prod(axis.size for axis in axes)
    assert sent_whole(transfer, axes) == (shards == 1 or size <= shards * TINY)
    if shards == 1:
        assert all(local_slices(transfer, axes, rank) == local_slices(transfer, axes, 0) for rank in range(world))
    if sent_whole(transfer, axes):
        assert bytes_sent(transfer, axes) == size * (world - 1).bit_length(), "once in every round of the tree"


def test_of_a_sharded_model_rank_0_sends_all_but_its_own_and_of_replicas_of_shards_little_more() -> None:
    shards = (Axis(name="shard", size=512),)
    sharded = Transfer(name="w", dtype="bfloat16", shape=(8192, 8192), placements=("shard(0)",))
    whole = 8192 * 8192 * 2
    assert bytes_sent(sharded, shards) == whole * 511 // 512
    replicas = (Axis(name="replicate", size=8), Axis(name="shard", size=64))
    both = Transfer(name="w", dtype="bfloat16", shape=(8192, 8192), placements=("replicate", "shard(0)"))
    assert bytes_sent(both, replicas) == whole * (63 + 3) // 64
    assert bytes_sent(Transfer(name="w", dtype="bfloat16", shape=(8192, 8192)), replicas) == whole * 9


def test_the_binomial_tree_over_eight_ranks_is_the_one_in_the_docstring() -> None:
    axes = (Axis(name="replicate", size=8),)
    weight = Transfer(name="w", dtype="float32", shape=(4,))
    receivers = {rank: [send.to for send in sends(weight, axes, rank)] for rank in range(8)}
    assert receivers == {0: [1, 2, 4], 1: [3, 5], 2: [6], 3: [7], 4: [], 5: [], 6: [], 7: []}
    rounds = re.findall(r"(\d) -> (\d)", broadcast.__doc__ or "")
    assert sorted(rounds) == sorted((str(rank), str(to)) for rank, to_all in receivers.items() for to in to_all)
