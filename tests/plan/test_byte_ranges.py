"""Headers of safetensors files, and the bytes that each rank reads."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from itertools import product
from math import prod
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepkit.formats.safetensors_header import Header, HeaderError, parse_header
from prepkit.plan.byte_ranges import ranges
from prepkit.plan.layout import ParamLayout, Placement, local_shape
from prepkit.steps import Axis, FileSlice

GOOD: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "b": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [8, 20]},
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "none": {"dtype": "F32", "shape": [0, 4], "data_offsets": [20, 20]},
}


def head(data: object) -> bytes:
    text = data if isinstance(data, bytes) else json.dumps(data).encode()
    return struct.pack("<Q", len(text)) + text


def test_a_header_gives_every_tensor_with_its_place_in_the_file() -> None:
    first = head(GOOD)
    found = parse_header(first, file=3)
    base = len(first)
    assert [(t.key, t.dtype, t.shape, t.start, t.length, t.file) for t in found.tensors] == [
        ("a", "float32", (2,), base, 8, 3),
        ("b", "bfloat16", (2, 3), base + 8, 12, 3),
        ("none", "float32", (0, 4), base + 20, 0, 3),
    ]
    assert (found.data, found.end) == (base, base + 20)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b"1234567", "it has 7 bytes"),
        (b"PK\x03\x04aaaaaaaaaa", "gives? a header of|give a header of"),
        (head(GOOD)[:-1], "ends after"),
        (head(b"{]"), "no JSON"),
        (head(b"\xff\xfe"), "no JSON"),
        (head([1]), "no JSON object"),
        (head({"a": {"dtype": "F32", "shape": [2]}}), "the entry of `a` lacks"),
        (head({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}), r"`a` has shape \[-2\]"),
        (head({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}}), "`a` is float32"),
        (head({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}), "`a` begins at byte"),
    ],
)
def test_what_is_no_header_is_refused_with_why(bad: bytes, said: str) -> None:
    with pytest.raises(HeaderError, match=said):
        parse_header(bad)


@given(st.binary(max_size=60) | st.binary(max_size=60).map(head))
def test_any_bytes_are_a_header_or_are_refused(data: bytes) -> None:
    with suppress(HeaderError):
        assert isinstance(parse_header(data), Header)


@st.composite
def split(draw: st.DrawFn) -> tuple[FileSlice, tuple[Axis, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    sizes = draw(st.lists(st.integers(1, 5), max_size=2))
    options = [
        "replicate",
        "off-mesh",
        *(f"{kind}({dim})" for dim in range(len(shape)) for kind in ("shard", "strided")),
    ]
    placements = tuple(draw(st.sampled_from(options)) for _ in sizes)
    dtype = draw(st.sampled_from(["uint8", "bfloat16", "float32"]))
    source = FileSlice(
        name="w", key="w", file=0, start=draw(st.integers(0, 99)), dtype=dtype, shape=shape, placements=placements
    )
    return source, tuple(Axis(name=f"axis{index}", size=size) for index, size in enumerate(sizes))


@given(split())
def test_the_ranks_read_every_byte_as_often_as_there_are_copies(case: tuple[FileSlice, tuple[Axis, ...]]) -> None:
    source, axes = case
    item = {"uint8": 1, "bfloat16": 2, "float32": 4}[source.dtype]
    copies = prod(a.size for a, p in zip(axes, source.placements, strict=True) if p in ("replicate", "off-mesh"))
    read = [0] * (prod(source.shape) * item)
    for rank in range(prod(axis.size for axis in axes)):
        last = source.start
        for part in ranges(source, axes, rank):
            assert part.length > 0
            assert part.start >= last, "in order"
            last = part.start + part.length
            for place in range(part.start, last):
                read[place - source.start] += 1
    assert set(read) <= {copies}


WORDS = get_args(Placement)
PLANNED = {(), *((word,) for word in WORDS if word != "strided(0)"), *product(("replicate", "off-mesh"), WORDS[:3])}
PLANNED |= {("shard(0)", "shard(1)"), ("shard(0)", "replicate"), ("shard(0)", "off-mesh"), ("strided(0)", "shard(0)")}
"""What plans hold; other combinations are cut in an order of their own."""


@given(split(), st.data())
def test_a_rank_reads_as_many_bytes_as_its_part_has(
    case: tuple[FileSlice, tuple[Axis, ...]], data: st.DataObject
) -> None:
    source, axes = case
    if source.placements not in PLANNED:
        return
    rank = data.draw(st.integers(0, prod(axis.size for axis in axes) - 1))
    item = {"uint8": 1, "bfloat16": 2, "float32": 4}[source.dtype]
    layout = ParamLayout(
        name="w",
        shape=source.shape,
        dtype=source.dtype,
        cls="DTensor",
        placements=source.placements,  # type: ignore[arg-type]
        unit="",
        requires_grad=True,
    )
    found = ranges(source, axes, rank)
    assert sum(part.length for part in found) == prod(local_shape(layout, axes, rank)) * item
    if not any("(1)" in word for word in source.placements):
        assert len(found) <= 1, "a part of dim 0 is one range"
