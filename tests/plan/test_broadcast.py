"""The ways that a tensor takes from rank 0: every rank gets exactly the part that the plan gives it, and once."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepkit.plan import broadcast
from prepkit.plan.broadcast import ROOT, TINY, box, bytes_sent, goes_whole, legs, origin
from prepkit.plan.byte_ranges import Part, parts
from prepkit.plan.dtypes import itemsize
from prepkit.steps import Axis, Transfer

CUTS = ("replicate", "off-mesh", "shard(0)", "shard(1)", "shard(2)", "strided(0)")


@st.composite
def travels(draw: st.DrawFn, longest: int = 9) -> tuple[Transfer, tuple[Axis, ...]]:
    """A tensor of up to three dims, some empty, on a mesh of up to three axes, cut along dims that it has."""
    shape = tuple(draw(st.lists(st.integers(0, longest), max_size=3)))
    axes = tuple(Axis(name=f"axis {place}", size=draw(st.integers(1, 5))) for place in range(draw(st.integers(0, 3))))
    able = [cut for cut in CUTS if "(" not in cut or int(cut[-2]) < len(shape)]
    placements = tuple(draw(st.sampled_from(able)) for _ in axes) if draw(st.booleans()) else ()
    dtype = draw(st.sampled_from(("float32", "bfloat16", "int64", "bool", "complex64")))
    return Transfer(name="w", dtype=dtype, shape=shape, placements=placements), axes


def keepers(one: Transfer, axes: tuple[Axis, ...]) -> dict[int, tuple[Part, ...]]:
    """Rank to what it is to get, of those that get anything."""
    whole = tuple(Part(start=0, size=size) for size in one.shape or (1,))
    all_get = whole if goes_whole(one, axes) else None
    every = {rank: all_get or box(one, axes, rank) for rank in range(prod(axis.size for axis in axes))}
    return {rank: kept for rank, kept in every.items() if all(part.size for part in kept)}


@given(travels())
def test_every_rank_gets_exactly_its_part_and_gets_it_once_from_one_that_has_it(
    travel: tuple[Transfer, tuple[Axis, ...]],
) -> None:
    one, axes = travel
    kept = keepers(one, axes)
    world = prod(axis.size for axis in axes)
    arrived = {ROOT}
    for rank in range(world):  # nobody gets its part from a rank behind it
        for leg in legs(one, axes, rank):
            assert rank in arrived, f"{rank} sends what it has not got"
            assert leg.to not in arrived, f"{leg.to} gets its part twice"
            assert origin(one, axes, leg.to) == rank
            assert leg.box == kept[leg.to]
            assert rank == ROOT or leg.box == kept[rank]
            arrived.add(leg.to)
    assert arrived == {ROOT} | kept.keys()


@given(travels())
def test_a_part_leaves_rank_0_once_however_many_keep_it_but_for_its_own(
    travel: tuple[Transfer, tuple[Axis, ...]],
) -> None:
    one, axes = travel
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(broadcast, "TINY", 0)
        lies, world = broadcast.grid(one, axes), prod(axis.size for axis in axes)
        assert lies.pieces * lies.replicas == world
        rounds = (lies.replicas - 1).bit_length()
        sizes = {leg.to: prod(part.size for part in leg.box) for leg in legs(one, axes, ROOT)}
        assert len(sizes) <= lies.pieces - 1 + rounds
        assert all(len(legs(one, axes, rank)) <= rounds for rank in range(1, world))
        assert bytes_sent(one, axes) == sum(sizes.values()) * itemsize(one.dtype)
        mine = box(one, axes, ROOT)
        others = sum(size for to, size in sizes.items() if box(one, axes, to) != mine)
        assert others == prod(one.shape) - prod(part.size for part in mine)


@given(travels(longest=200))
def test_what_is_whole_or_in_tiny_parts_goes_whole_and_nothing_else(travel: tuple[Transfer, tuple[Axis, ...]]) -> None:
    one, axes = travel
    size = prod(one.shape) * itemsize(one.dtype)
    cut, world = broadcast.grid(one, axes).pieces, prod(axis.size for axis in axes)
    assert goes_whole(one, axes) == (cut == 1 or size <= cut * TINY)
    if cut == 1:
        assert all(parts(one, axes, rank) == parts(one, axes, 0) for rank in range(world))
    if goes_whole(one, axes):
        assert bytes_sent(one, axes) == size * (world - 1).bit_length(), "once in every round of the tree"


def test_of_a_sharded_model_rank_0_sends_all_but_its_own_and_of_copies_of_shards_little_more() -> None:
    shards = (Axis(name="shard", size=512),)
    one = Transfer(name="w", dtype="bfloat16", shape=(8192, 8192), placements=("shard(0)",))
    whole = 8192 * 8192 * 2
    assert bytes_sent(one, shards) == whole * 511 // 512
    copies = (Axis(name="replicate", size=8), Axis(name="shard", size=64))
    both = Transfer(name="w", dtype="bfloat16", shape=(8192, 8192), placements=("replicate", "shard(0)"))
    assert bytes_sent(both, copies) == whole * (63 + 3) // 64
    assert bytes_sent(Transfer(name="w", dtype="bfloat16", shape=(8192, 8192)), copies) == whole * 9
