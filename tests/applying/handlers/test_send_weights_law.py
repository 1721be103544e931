"""What every rank has after sending is what the plan gives it, however tensors lie, are sharded, cast and travel."""

from __future__ import annotations

from functools import partial
from math import prod

import pytest
import torch
from attrs import frozen
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from prepkit.applying.handlers import send_weights
from prepkit.applying.handlers.send_weights import send
from prepkit.plan import broadcast
from prepkit.plan.byte_ranges import local_slices
from prepkit.ranks import channel as channels
from prepkit.ranks.channel import P2PChannel
from prepkit.ranks.world import Ranks
from prepkit.steps import Axis, Transfer
from tests.support.in_memory_messages import InMemoryNetwork

PLACEMENTS = ("replicate", "off-mesh", "shard(0)", "shard(1)", "strided(0)")


@st.composite
def transfers(draw: st.DrawFn) -> tuple[Transfer, tuple[Axis, ...]]:
    """A tensor of up to three dims, some empty, on a mesh of up to two axes, sharded along dims that it has."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    axes = tuple(
        Axis(name=name, size=draw(st.integers(1, 4))) for name in ("replicate", "shard")[: draw(st.integers(0, 2))]
    )
    able = [word for word in PLACEMENTS if "(" not in word or int(word[-2]) < len(shape)]
    dtype = draw(st.sampled_from(("float32", "bfloat16", "int64", "bool", "complex64")))
    placements = tuple(draw(st.sampled_from(able)) for _ in axes)
    return Transfer(name="w", dtype=dtype, shape=shape, placements=placements), axes


@frozen(kw_only=True)
class Way:
    """How a tensor lies where it comes from and where it goes to, and how it travels."""

    turned: bool
    """The whole is a transposed view, whose elements lie in another order."""
    cast: bool
    """What ranks hold has another dtype."""
    message_bytes: int
    window: int
    tiny: int
    device: bool = False
    """As over NCCL: what goes whole is broadcast, and every message is waited for at once."""


WAYS = st.builds(
    Way,
    turned=st.booleans(),
    cast=st.booleans(),
    message_bytes=st.integers(1, 200),
    window=st.integers(0, 400),
    tiny=st.sampled_from((0, 16, 4096)),
    device=st.booleans(),
)


def received(
    transfer: Transfer, axes: tuple[Axis, ...], value: Tensor, way: Way
) -> tuple[list[Tensor], InMemoryNetwork]:
    """What every rank of the mesh has in the end, and what was sent; no rank is a process."""
    network, shards = InMemoryNetwork(), []
    dtype = torch.complex128 if value.dtype.is_complex else torch.float64 if way.cast else value.dtype
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(channels, "dist", network)
        patches.setattr(broadcast, "TINY", way.tiny)
        patches.setattr(P2PChannel, "on_host", not way.device)
        size = prod(axis.size for axis in axes)
        for rank in range(size):
            network.rank = rank
            patches.setattr(send_weights, "world", partial(Ranks, rank=rank, size=size))
            shard = torch.zeros([part.size for part in local_slices(transfer, axes, rank)], dtype=dtype)
            window = 0 if way.device else way.window
            channel = P2PChannel(device=torch.device("cpu"), message_bytes=way.message_bytes, window=window)
            send(transfer, axes, value if rank == 0 else None, shard, channel)
            assert rank > 0 or network.waiting <= channel.window
            channel.drain()
            shards.append(shard)
        assert send_weights._wire_bytes(transfer, axes, channel) == sum(network.sizes[0])
    return shards, network


MESH = (Axis(name="replicate", size=2), Axis(name="shard", size=2))
COLUMNS = Transfer(name="w", dtype="float32", shape=(6, 5), placements=("replicate", "shard(1)")), MESH


# Several messages pass through a buffer of one.
@example(COLUMNS, Way(turned=True, cast=True, message_bytes=50, window=300, tiny=0))
@example(COLUMNS, Way(turned=False, cast=False, message_bytes=50, window=300, tiny=4096))
@given(transfers(), WAYS)
def test_every_rank_gets_the_bytes_that_the_plan_gives_it_and_no_others_reach_it(
    case: tuple[Transfer, tuple[Axis, ...]], way: Way
) -> None:
    transfer, axes = case
    dtype = getattr(torch, transfer.dtype)
    raw = torch.randint(0, 2, (prod(transfer.shape) * dtype.itemsize,), dtype=torch.uint8)
    value = raw.view(dtype).view(transfer.shape) if raw.numel() else torch.empty(transfer.shape, dtype=dtype)
    if way.turned:
        back = tuple(reversed(range(value.dim())))
        value = value.permute(back).contiguous().permute(back)
    shards, network = received(transfer, axes, value, way)
    for rank, shard in enumerate(shards):
        expected = value
        for dim, part in enumerate(local_slices(transfer, axes, rank)):
            expected = expected.narrow(dim, part.start, part.size)
        assert torch.equal(shard, expected.to(shard.dtype))
    assert not any(unread for (_, receiver), unread in network.messages.items() if receiver >= 0), "all is received"
    row = prod(transfer.shape[1:]) * dtype.itemsize
    assert all(size <= max(way.message_bytes, row) for sizes in network.sizes.values() for size in sizes)
