"""Tensors that lie in a file in parts, the whole that torch makes of them, and how ranks cut it."""

from __future__ import annotations

from math import prod

import torch
from attrs import frozen
from hypothesis import strategies as st
from torch import Tensor

from prepkit.facts.checkpoint import KeyMapping, StoredTensor, WeightConverter
from prepkit.plan.layout import coordinate
from prepkit.resolve.checkpoint import assemble
from prepkit.steps import Axis, FileSlice


@frozen
class InParts:
    """One tensor of a model, and the bytes of the file that it is read from."""

    whole: Tensor
    """As ``torch.stack`` and ``torch.cat`` make it; every element is another number."""
    stored: tuple[StoredTensor, ...]
    """In no order."""
    recipe: WeightConverter | None
    data: bytes

    def sources(self, placements: tuple[str, ...]) -> tuple[FileSlice, ...]:
        """As the planner writes them."""
        made = assemble("w", self.stored, self.recipe)
        assert not made.wrong, made.wrong
        return tuple(
            FileSlice(
                name="w",
                key=one.key,
                file=0,
                start=one.start,
                dtype=one.dtype,
                shape=made.shape,
                placements=placements,
                chunk=block,
            )
            for one, block in zip(made.stored, made.blocks, strict=True)
        )


@st.composite
def in_parts(draw: st.DrawFn) -> InParts:
    """Up to four tensors of up to three dims stacked, up to three of these joined, and single ones."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    stack = draw(st.none() | st.integers(0, len(shape)))
    dims = len(shape) + (stack is not None)
    join = draw(st.none() | st.integers(0, dims - 1)) if dims else None
    if stack is None and join is None:
        return _written(draw, [torch.arange(prod(shape), dtype=torch.int32).view(shape)], None, None)
    counts = draw(st.integers(1, 4))
    slabs, begin = [], 0
    for _ in range(draw(st.integers(1, 3)) if join is not None else 1):
        own, many = list(shape), counts if stack is not None else 1
        if join is not None and join != stack:
            own[join - (stack is not None and stack < join)] = draw(st.integers(0, 4))
        elif join is not None:
            many = draw(st.integers(1, 4))
        slabs.append([torch.arange(begin + n * prod(own), begin + (n + 1) * prod(own)).view(own) for n in range(many)])
        begin += many * prod(own)
    return _written(draw, [[one.to(torch.int32) for one in slab] for slab in slabs], stack, join)


def _written(draw: st.DrawFn, slabs: list[list[Tensor]] | list[Tensor], stack: int | None, join: int | None) -> InParts:
    """The tensors in drawn places of a file, with bytes between them that are nobody's."""
    slabs = [[one] if isinstance(one, Tensor) else one for one in slabs]
    recipe = WeightConverter(sources=tuple(f"experts.*.w{n}" for n in range(len(slabs))), stack=stack, join=join)
    stacked = [torch.stack(slab, stack) if stack is not None else slab[0] for slab in slabs]
    places = [(source, number, one) for source, slab in enumerate(slabs) for number, one in enumerate(slab)]
    data, stored = b"", []
    for source, number, one in draw(st.permutations(places)):
        data += bytes(draw(st.integers(0, 3)))
        plain = stack is None and join is None
        place = None if plain else KeyMapping(name="w", recipe=0, source=source, number=number)
        raw = one.contiguous().numpy().tobytes()
        key = "w" if plain else f"experts.{number}.w{source}"
        stored.append(
            StoredTensor(
                key=key, dtype="int32", shape=tuple(one.shape), file=0, start=len(data), length=len(raw), place=place
            )
        )
        data += raw
    whole = torch.cat(stacked, join) if join is not None else stacked[0]
    return InParts(whole, tuple(stored), None if stack is None and join is None else recipe, data)


@st.composite
def cuts(draw: st.DrawFn, dims: int) -> tuple[tuple[str, ...], tuple[Axis, ...]]:
    """Placements and axes for a tensor of so many dims: copies, shards of any dim, and dims cut twice."""
    words = ["replicate", "off-mesh", *(f"{kind}({dim})" for dim in range(dims) for kind in ("shard", "strided"))]
    sizes = draw(st.lists(st.integers(1, 5), max_size=2))
    placements = tuple(draw(st.sampled_from(words)) for _ in sizes)
    return placements, tuple(Axis(name=f"axis{index}", size=size) for index, size in enumerate(sizes))


def part_of(whole: Tensor, placements: tuple[str, ...], axes: tuple[Axis, ...], rank: int) -> Tensor:
    """What a rank holds, by ``torch.chunk``: strided axes cut last."""
    steps = list(zip(placements, axes, coordinate(rank, axes), strict=True))
    for placement, axis, index in sorted(steps, key=lambda step: step[0].startswith("strided")):
        if placement not in ("replicate", "off-mesh"):
            dim = int(placement[-2])
            chunks = whole.chunk(axis.size, dim)
            whole = chunks[index] if index < len(chunks) else whole.narrow(dim, 0, 0)
    return whole
