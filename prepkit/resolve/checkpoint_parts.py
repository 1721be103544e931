"""How the tensors of a checkpoint make up one of the model's: which block of it each is, and what is wrong with them.

Arithmetic on shapes, after ``torch.stack`` and ``torch.cat``, which transformers calls for ``MergeModulelist`` and
``Concatenate`` (``core_model_loading.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from attrs import frozen

from prepkit.facts.checkpoint import KeyMapping, StoredTensor, WeightConverter
from prepkit.steps import Chunk

Stack = tuple[StoredTensor, ...]
"""Tensors that are stacked, in their order; where nothing is stacked a single one."""


@frozen(kw_only=True)
class AssembledTensor:
    """What fills one parameter or buffer."""

    name: str
    stored: tuple[StoredTensor, ...]
    """In the order in which they are joined and stacked."""
    blocks: tuple[Chunk | None, ...] = ()
    """Of each what it is of the whole; None: all of it. Empty where they make up no tensor."""
    shape: tuple[int, ...] = ()
    """What they make up."""
    recipe: WeightConverter | None = None
    """How; None: there is one tensor, which is the whole."""
    wrong: str = ""
    """Why they make up no tensor."""


def assemble(name: str, stored: Sequence[StoredTensor], recipe: WeightConverter | None) -> AssembledTensor:
    """The whole that the tensors make up by the recipe; without one that is the first of them.

    >>> recipe = WeightConverter(sources=("experts.*.up", "experts.*.gate"), stack=0, join=1)
    >>> place = KeyMapping(name="experts", recipe=0)
    >>> up = StoredTensor(key="experts.0.up", dtype="int8", shape=(2, 5), file=0, start=0, length=10, place=place)
    >>> gate = StoredTensor(key="experts.0.gate", dtype="int8", shape=(3, 5), file=0, start=10, length=15,
    ...                     place=KeyMapping(name="experts", recipe=0, source=1))
    >>> made = assemble("experts", (gate, up), recipe)
    >>> made.shape, made.blocks[1]
    ((1, 5, 5), Chunk(offsets=(0, 2, 0), sizes=(1, 3, 5)))
    """
    if recipe is None:
        return AssembledTensor(name=name, stored=tuple(stored[:1]), blocks=(None,), shape=stored[0].shape)
    ordered = tuple(sorted(stored, key=_order))
    slabs = tuple(_slabs(ordered, recipe))
    if wrong := _misfit(slabs, recipe):
        return AssembledTensor(name=name, stored=ordered, recipe=recipe, wrong=wrong)
    shape, blocks = list(_stacked(slabs[0], recipe)), []
    offset = 0
    for slab in slabs:
        blocks += [_block(slab, index, recipe, offset) for index in range(len(slab))]
        offset += _stacked(slab, recipe)[recipe.join] if recipe.join is not None else 0
    if recipe.join is not None:
        shape[recipe.join] = offset
    return AssembledTensor(name=name, stored=ordered, blocks=tuple(blocks), shape=tuple(shape), recipe=recipe)


def lacking(filled: AssembledTensor, size: int) -> tuple[str, ...]:
    """Keys that a stack of ``size`` tensors should have too, by the numbers in those of the others; none if all count.

    >>> place = KeyMapping(name="experts", recipe=0)
    >>> up = StoredTensor(key="experts.1.up", dtype="int8", shape=(), file=0, start=0, length=1, place=place)
    >>> converter = WeightConverter(sources=("experts.*.up",), stack=0)
    >>> lacking(AssembledTensor(name="experts", stored=(up,), recipe=converter), 3)
    ('experts.0.up', 'experts.2.up')
    """
    if filled.recipe is None or filled.recipe.stack in (None, filled.recipe.join):
        return ()
    return tuple(key for slab in _slabs(filled.stored, filled.recipe) for key in _absent(slab, range(size)))


def unmatched(filled: AssembledTensor) -> tuple[str, ...]:
    """The recipe's patterns that no key has matched."""
    there = {_place(one).source for one in filled.stored if filled.recipe is not None}
    return tuple(
        pattern for index, pattern in enumerate(filled.recipe.sources if filled.recipe else ()) if index not in there
    )


def _place(one: StoredTensor) -> KeyMapping:
    return one.place or KeyMapping(name=one.key)


def _order(one: StoredTensor) -> tuple[int, int]:
    place = _place(one)
    return place.source, place.number


def _slabs(ordered: Stack, recipe: WeightConverter) -> Iterable[Stack]:
    if recipe.stack is None:
        return ((one,) for one in ordered)
    return (tuple(some) for _, some in groupby(ordered, key=lambda one: _place(one).source))


def _stacked(slab: Stack, recipe: WeightConverter) -> tuple[int, ...]:
    """Shape of what the tensors of a slab make up."""
    shape = slab[0].shape
    return shape if recipe.stack is None else (*shape[: recipe.stack], len(slab), *shape[recipe.stack :])


def _block(slab: Stack, index: int, recipe: WeightConverter, offset: int) -> Chunk:
    shape = _stacked(slab[:1], recipe)
    start = [0] * len(shape)
    if recipe.stack is not None:
        start[recipe.stack] = index
    if recipe.join is not None:
        start[recipe.join] += offset
    return Chunk(offsets=tuple(start), sizes=shape)


def _misfit(slabs: tuple[Stack, ...], recipe: WeightConverter) -> str:
    """Why ``torch.stack`` and ``torch.cat`` would refuse them, or cast them; empty where they would not."""
    first = slabs[0][0]
    for one in (one for slab in slabs for one in slab):
        if one.dtype != first.dtype:
            return f"`{first.key}` is {first.dtype}, `{one.key}` is {one.dtype}"
        if len(one.shape) != len(first.shape):
            return f"`{first.key}` is {list(first.shape)}, `{one.key}` is {list(one.shape)}"
    if recipe.stack is not None:
        if wrong := next((text for slab in slabs if (text := _uneven(slab))), ""):
            return wrong
        if recipe.join != recipe.stack and (absent := _unlike(slabs)):
            return f"the checkpoint lacks {', '.join(f'`{key}`' for key in absent[:3])}"
    return _unjoined(slabs, recipe)


def _uneven(slab: Stack) -> str:
    other = next((one for one in slab if one.shape != slab[0].shape), slab[0])
    if other is slab[0]:
        return ""
    return f"`{slab[0].key}` is {list(slab[0].shape)}, `{other.key}` is {list(other.shape)}"


def _unjoined(slabs: tuple[Stack, ...], recipe: WeightConverter) -> str:
    """What keeps the slabs from being joined."""
    shapes = [_stacked(slab, recipe) for slab in slabs]
    dims = len(shapes[0])
    if not all(0 <= dim < dims for dim in (recipe.stack, recipe.join) if dim is not None):
        return f"`{slabs[0][0].key}` is {list(slabs[0][0].shape)}, which has too few dimensions"
    for slab, shape in zip(slabs, shapes, strict=True):
        if any(shape[dim] != shapes[0][dim] for dim in range(dims) if dim != recipe.join):
            first, other = slabs[0][0], slab[0]
            return (
                f"{len(slabs[0])} like `{first.key}` are {list(shapes[0])}, "
                f"{len(slab)} like `{other.key}` are {list(shape)}"
            )
    return ""


def _unlike(slabs: tuple[Stack, ...]) -> tuple[str, ...]:
    """Keys that some of the slabs lack, by the numbers in those of the others."""
    counts = {len(slab) for slab in slabs}
    if len(slabs) == 1 or counts == {1}:  # the number in a single key is no more than a guess
        return ()
    known = [_numbers(slab) for slab in slabs]
    if all(numbers == known[0] for numbers in known):
        return ()
    every = [number for numbers in known for number in numbers]
    return tuple(key for slab in slabs for key in _absent(slab, every))


def _segment(slab: Stack) -> int | None:
    """Which segment of the keys numbers them: the last in which they differ, of a single key its last number."""
    keys = [one.key.split(".") for one in slab]
    if len({len(key) for key in keys}) > 1:
        return None
    several = [index for index, parts in enumerate(zip(*keys, strict=True)) if len(keys) == 1 or len(set(parts)) > 1]
    differ = [index for index in several if all(key[index].isdecimal() for key in keys)]
    return differ[-1] if differ else None


def _numbers(slab: Stack) -> tuple[int, ...]:
    """Of ``layers.3.experts.7.w1.weight``, beside others of that layer, 7."""
    segment = _segment(slab)
    return () if segment is None else tuple(int(one.key.split(".")[segment]) for one in slab)


def _absent(slab: Stack, numbers: Iterable[int]) -> tuple[str, ...]:
    """Keys like those of the slab with the numbers that it lacks."""
    segment = _segment(slab)
    if segment is None:
        return ()
    parts = slab[0].key.split(".")
    lacks = sorted(set(numbers) - set(_numbers(slab)))
    return tuple(".".join((*parts[:segment], str(number), *parts[segment + 1 :])) for number in lacks)
