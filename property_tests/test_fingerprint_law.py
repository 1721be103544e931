"""Fingerprints of drawn cuts add up to that of the whole tensor, whatever cuts it: runs, boxes, DTensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from prepkit.observe.fingerprints.parts import _box, _of_dtensor
from prepkit.observe.fingerprints.tensor import fingerprint, fingerprint_sum
from prepkit.plan.layout import chunk

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int8, torch.complex64])
SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(9)
    return values.gt(0) if dtype is torch.bool else values.to(dtype)


@given(SHAPES, DTYPES, st.data())
def test_runs_of_the_elements_add_up(shape: tuple[int, ...], dtype: torch.dtype, data: st.DataObject) -> None:
    whole = drawn(shape, dtype, 0)
    cuts = sorted(data.draw(st.lists(st.integers(0, whole.numel()), max_size=5)))
    edges = list(zip([0, *cuts], [*cuts, whole.numel()], strict=True))
    assert sum(fingerprint(whole.reshape(-1)[a:b], a) for a, b in edges) % 2**64 == fingerprint(whole)


@given(SHAPES, DTYPES, st.data())
def test_boxes_along_any_dims_add_up(shape: tuple[int, ...], dtype: torch.dtype, data: st.DataObject) -> None:
    whole = drawn(shape, dtype, 1)
    sides: list[list[tuple[int, int]]] = []
    for size in shape:
        cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=3)))
        sides.append([(a, b - a) for a, b in zip([0, *cuts], [*cuts, size], strict=True)])
    total = 0
    for spans in product(*sides):
        part = whole
        for dim, (first, size) in enumerate(spans):
            part = part.narrow(dim, first, size)
        start, dims = _box(shape, list(spans))
        total += int(fingerprint_sum(part, start, dims))
    assert total % 2**64 == fingerprint(whole)


@contextmanager
def rank(of: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=of, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@given(st.tuples(st.integers(1, 3), st.integers(1, 3)), SHAPES.filter(bool), st.data())
def test_the_parts_of_a_dtensor_with_any_placements_add_up_per_replica(
    sizes: tuple[int, int], shape: tuple[int, ...], data: st.DataObject
) -> None:
    whole = drawn(shape, torch.float32, 2)
    dims = st.one_of(st.none(), st.integers(0, len(shape) - 1))
    first, second = data.draw(dims), data.draw(dims)
    strided = first is not None and first == second and data.draw(st.booleans())  # as fully_shard cuts what is cut
    totals: dict[int, int] = {}
    for at in range(prod(sizes)):
        with rank(at, prod(sizes)):
            mesh = DeviceMesh("cpu", torch.arange(prod(sizes)).view(sizes))
            tensor: Any = whole
            order = ((1, second), (0, first)) if strided else ((0, first), (1, second))
            for axis, dim in order:
                if dim is not None:
                    begin, rows = chunk(tensor.shape[dim], sizes[axis], mesh.get_coordinate()[axis])
                    tensor = tensor.narrow(dim, begin, rows)
            ahead = _StridedShard(first or 0, split_factor=sizes[1]) if strided else Shard(first or 0)
            placements = [ahead if first is not None else Replicate(), Replicate() if second is None else Shard(second)]
            one = DTensor.from_local(
                tensor, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
            part = _of_dtensor(one, {})
            assert part is not None
            totals[part.replica] = (totals.get(part.replica, 0) + int(part.total())) % 2**64
    assert set(totals.values()) == {fingerprint(whole)}
    assert len(totals) == (sizes[0] if first is None else 1) * (sizes[1] if second is None else 1)
