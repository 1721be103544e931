"""What the ranks read of a tensor that lies in parts is the tensor that torch would make of them, each byte once."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from unittest.mock import patch

import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prepkit.applying.handlers import read_weights
from prepkit.facts.checkpoint import WeightConverter
from prepkit.plan.byte_ranges import complete, filled_slices, ranges, reads
from prepkit.resolve.checkpoint import assemble, lacking
from prepkit.steps import Axis, FileSlice, FlatPlace
from property_tests.support.split_tensors import InParts, cuts, in_parts, part_of

ITEM = 4
"""Bytes of one element."""


@st.composite
def cut_parts(draw: st.DrawFn) -> tuple[InParts, tuple[str, ...], tuple[Axis, ...]]:
    case = draw(in_parts())
    return case, *draw(cuts(case.whole.dim()))


@given(in_parts())
def test_blocks_are_where_torch_puts_the_parts(case: InParts) -> None:
    made = assemble("w", case.stored, case.recipe)
    assert made.shape == tuple(case.whole.shape)
    for one, block in zip(made.stored, made.blocks, strict=True):
        there = case.whole
        for dim, (start, size) in enumerate(zip(block.offsets, block.sizes, strict=True) if block else ()):
            there = there.narrow(dim, start, size)
        assert there.contiguous().numpy().tobytes() == case.data[one.start : one.start + one.length]
    assert complete(case.sources(())) == {"w"}


@given(cut_parts())
def test_the_ranks_read_what_torch_would_give_them_each_byte_once_per_copy(
    cut: tuple[InParts, tuple[str, ...], tuple[Axis, ...]],
) -> None:
    case, placements, axes = cut
    copies = prod(axis.size for axis, word in zip(axes, placements, strict=True) if word in ("replicate", "off-mesh"))
    read = [0] * len(case.data)
    for rank in range(prod(axis.size for axis in axes)):
        expected = part_of(case.whole, placements, axes, rank)
        found = torch.full(expected.shape, -1, dtype=torch.int32)
        for source in case.sources(placements):
            bytes_of = b"".join(case.data[one.start : one.start + one.length] for one in ranges(source, axes, rank))
            into = found
            for dim, one in enumerate(filled_slices(source, axes, rank)):
                into = into.narrow(dim, one.start, one.size)
            if bytes_of:
                into.copy_(torch.frombuffer(bytearray(bytes_of), dtype=torch.int32).view(into.shape))
            assert len(bytes_of) == into.numel() * ITEM
            for one in ranges(source, axes, rank):
                for place in range(one.start, one.start + one.length):
                    read[place] += 1
        assert torch.equal(found, expected)
    assert {times for one in case.stored for times in read[one.start : one.start + one.length]} <= {copies}


@contextmanager
def opened(data: bytes) -> Iterator[int]:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        yield file.fileno()


def filled(case: InParts, sources: tuple[FileSlice, ...], axes: tuple[Axis, ...], rank: int, like: Tensor) -> Tensor:
    """What the handler reads into a tensor that holds other values."""
    staging = read_weights.Staging()
    with opened(case.data) as descriptor:
        for source in sources:
            boxes = reads(source, axes, rank)
            read_weights._check_size(like, boxes)
            for box in boxes:
                read_weights._fill(read_weights._filled_part(like, box), source, box.ranges, descriptor, staging)
    return like


@given(cut_parts(), st.data(), st.integers(4, 60), st.sampled_from([torch.int32, torch.float64]), st.booleans())
def test_the_handler_reads_into_any_storage_through_any_buffer(
    cut: tuple[InParts, tuple[str, ...], tuple[Axis, ...]],
    data: st.DataObject,
    staging: int,
    dtype: torch.dtype,
    turned: bool,
) -> None:
    case, placements, axes = cut
    rank = data.draw(st.integers(0, prod(axis.size for axis in axes) - 1))
    expected = part_of(case.whole, placements, axes, rank)
    like = torch.full(expected.shape, -1, dtype=dtype)
    if turned:  # not contiguous, as a view of something transposed
        like = torch.full(expected.shape[::-1], -1, dtype=dtype).permute(tuple(reversed(range(expected.dim()))))
    with patch.object(read_weights, "STAGING", staging):
        assert torch.equal(filled(case, tuple(case.sources(placements)), axes, rank, like), expected.to(dtype))


@given(in_parts(), st.integers(0, 9), st.integers(1, 30), st.integers(1, 4), st.integers(4, 60))
def test_the_ranks_read_their_elements_of_a_flat_parameter_wherever_it_is_cut(
    case: InParts, start: int, shard: int, ranks: int, staging: int
) -> None:
    place = FlatPlace(start=start, shard=shard, axis="shard")
    sources = tuple(evolve(source, flat=place) for source in case.sources(()))
    row = torch.cat((torch.zeros(start, dtype=torch.int32), case.whole.flatten()))
    for rank in range(ranks):
        expected = row[max(rank * shard, start) : max((rank + 1) * shard, start)]
        with patch.object(read_weights, "STAGING", staging):
            found = filled(case, sources, (Axis(name="shard", size=ranks),), rank, torch.full_like(expected, -1))
        assert torch.equal(found, expected)


@given(in_parts(), st.data())
def test_without_any_one_part_there_is_no_such_tensor(case: InParts, data: st.DataObject) -> None:
    out = data.draw(st.sampled_from(case.stored))
    left = tuple(one for one in case.stored if one is not out)
    if not left or not out.length:
        return
    made = assemble("w", left, case.recipe)
    assert made.wrong or made.shape != tuple(case.whole.shape)
    if case.recipe and case.recipe.join is None:
        assert lacking(made, len(case.stored)) == (out.key,)
    assert not complete(tuple(one for one in case.sources(()) if one.key != out.key))


@given(in_parts(), st.data())
def test_a_part_of_another_dtype_or_rank_makes_no_tensor(case: InParts, data: st.DataObject) -> None:
    if len(case.stored) < 2:
        return
    odd = data.draw(st.sampled_from(case.stored))
    changes = data.draw(st.sampled_from([{"dtype": "float32"}, {"shape": (*odd.shape, 1)}]))
    changed = tuple(evolve(one, **changes) if one is odd else one for one in case.stored)
    assert assemble("w", changed, case.recipe).wrong


@given(in_parts(), st.integers(-3, 5), st.integers(-3, 5))
def test_recipes_that_do_not_suit_the_parts_make_no_tensor_and_raise_nothing(
    case: InParts, stack: int, join: int
) -> None:
    """As a bent plan file may hold them."""
    bent = WeightConverter(sources=("a", "b"), stack=stack, join=join)
    made = assemble("w", case.stored, bent)
    dims = len(case.stored[0].shape) + 1
    assert made.wrong or (0 <= stack < dims and 0 <= join < dims)
