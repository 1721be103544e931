"""What every rank has after sending is what the plan gives it, however tensors lie, are cut, cast and travel."""

from __future__ import annotations

from math import prod

import pytest
import torch
from attrs import frozen
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from prepkit.live.handlers import channel as lanes
from prepkit.live.handlers import send_weights
from prepkit.live.handlers.channel import P2PChannel
from prepkit.live.handlers.send_weights import send
from prepkit.plan import broadcast
from prepkit.plan.byte_ranges import parts
from prepkit.steps import Axis, Transfer
from tests.support.in_memory_messages import Post

CUTS = ("replicate", "off-mesh", "shard(0)", "shard(1)", "strided(0)")


@st.composite
def travels(draw: st.DrawFn) -> tuple[Transfer, tuple[Axis, ...]]:
    """A tensor of up to three dims, some empty, on a mesh of up to two axes, cut along dims that it has."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    axes = tuple(
        Axis(name=name, size=draw(st.integers(1, 4))) for name in ("replicate", "shard")[: draw(st.integers(0, 2))]
    )
    able = [cut for cut in CUTS if "(" not in cut or int(cut[-2]) < len(shape)]
    dtype = draw(st.sampled_from(("float32", "bfloat16", "int64", "bool", "complex64")))
    placements = tuple(draw(st.sampled_from(able)) for _ in axes)
    return Transfer(name="w", dtype=dtype, shape=shape, placements=placements), axes


@frozen(kw_only=True)
class Ways:
    """How a tensor lies where it comes from and where it goes to, and how it travels."""

    turned: bool
    """The whole is a transposed view, whose elements lie in another order."""
    cast: bool
    """What ranks hold has another dtype."""
    piece: int
    window: int
    tiny: int
    device: bool = False
    """As over NCCL: what goes whole is broadcast, and every message is waited for at once."""


WAYS = st.builds(
    Ways,
    turned=st.booleans(),
    cast=st.booleans(),
    piece=st.integers(1, 200),
    window=st.integers(0, 400),
    tiny=st.sampled_from((0, 16, 4096)),
    device=st.booleans(),
)


def received(one: Transfer, axes: tuple[Axis, ...], value: Tensor, ways: Ways) -> tuple[list[Tensor], Post]:
    """What every rank of the mesh has in the end, and what was sent; no rank is a process."""
    post, found = Post(), []
    held = torch.complex128 if value.dtype.is_complex else torch.float64 if ways.cast else value.dtype
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(lanes, "dist", post)
        patches.setattr(broadcast, "TINY", ways.tiny)
        patches.setattr(P2PChannel, "on_host", not ways.device)
        for rank in range(prod(axis.size for axis in axes)):
            post.rank = rank
            patches.setattr(send_weights, "own_rank", lambda rank=rank: rank)
            into = torch.zeros([part.size for part in parts(one, axes, rank)], dtype=held)
            lane = P2PChannel(device=torch.device("cpu"), piece=ways.piece, window=0 if ways.device else ways.window)
            send(one, axes, value if rank == 0 else None, into, lane)
            assert rank > 0 or post.waiting <= lane.window
            lane.drain()
            found.append(into)
        assert send_weights._bytes(one, axes, lane) == sum(post.sizes[0])
    return found, post


MESH = (Axis(name="replicate", size=2), Axis(name="shard", size=2))
COLUMNS = Transfer(name="w", dtype="float32", shape=(6, 5), placements=("replicate", "shard(1)")), MESH


@example(COLUMNS, Ways(turned=True, cast=True, piece=50, window=300, tiny=0))  # several pieces of a buffer of one
@example(COLUMNS, Ways(turned=False, cast=False, piece=50, window=300, tiny=4096))
@given(travels(), WAYS)
def test_every_rank_gets_the_bytes_that_the_plan_gives_it_and_no_others_reach_it(
    travel: tuple[Transfer, tuple[Axis, ...]], ways: Ways
) -> None:
    one, axes = travel
    dtype = getattr(torch, one.dtype)
    raw = torch.randint(0, 2, (prod(one.shape) * dtype.itemsize,), dtype=torch.uint8)
    value = raw.view(dtype).view(one.shape) if raw.numel() else torch.empty(one.shape, dtype=dtype)
    if ways.turned:
        back = tuple(reversed(range(value.dim())))
        value = value.permute(back).contiguous().permute(back)
    found, post = received(one, axes, value, ways)
    for rank, into in enumerate(found):
        expected = value
        for dim, part in enumerate(parts(one, axes, rank)):
            expected = expected.narrow(dim, part.start, part.size)
        assert torch.equal(into, expected.to(into.dtype))
    assert not any(letters for (_, receiver), letters in post.letters.items() if receiver >= 0), "all is received"
    row = prod(one.shape[1:]) * dtype.itemsize
    assert all(size <= max(ways.piece, row) for sizes in post.sizes.values() for size in sizes)
