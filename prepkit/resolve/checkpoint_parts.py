"""How the tensors of a checkpoint make up one of the model's: which chunk of it each is, and what is wrong with them.

A mixture of experts may be stored as one matrix per expert and projection, and be one tensor in the model. A
converter says how: the tensors of each of its sources are *stacked* in a new dimension, in the order of the numbers in
their keys, and the stacks of all sources are *joined* along another. What is not stacked is a stack of one tensor.

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
    >>> experts = assemble("experts", (gate, up), recipe)
    >>> experts.shape, experts.blocks[1]
    ((1, 5, 5), Chunk(offsets=(0, 2, 0), sizes=(1, 3, 5)))
    """
    if recipe is None:
        return AssembledTensor(name=name, stored=tuple(stored[:1]), blocks=(None,), shape=stored[0].shape)
    ordered = tuple(sorted(stored, key=_order))
    stacks = tuple(_stacks(ordered, recipe))
    if wrong := _misfit(stacks, recipe):
        return AssembledTensor(name=name, stored=ordered, recipe=recipe, wrong=wrong)
    shape, blocks = list(_stacked(stacks[0], recipe)), []
    offset = 0
    for stack in stacks:
        blocks += [_block(stack, index, recipe, offset) for index in range(len(stack))]
        offset += _stacked(stack, recipe)[recipe.join] if recipe.join is not None else 0
    if recipe.join is not None:
        shape[recipe.join] = offset
    return AssembledTensor(name=name, stored=ordered, blocks=tuple(blocks), shape=tuple(shape), recipe=recipe)


def lacking(assembled: AssembledTensor, size: int) -> tuple[str, ...]:
    """Keys that a stack of ``size`` tensors should have too, by the numbers in those of the others; none if all count.

    >>> place = KeyMapping(name="experts", recipe=0)
    >>> up = StoredTensor(key="experts.1.up", dtype="int8", shape=(), file=0, start=0, length=1, place=place)
    >>> converter = WeightConverter(sources=("experts.*.up",), stack=0)
    >>> lacking(AssembledTensor(name="experts", stored=(up,), recipe=converter), 3)
    ('experts.0.up', 'experts.2.up')
    """
    if assembled.recipe is None or assembled.recipe.stack in (None, assembled.recipe.join):
        return ()
    return tuple(key for stack in _stacks(assembled.stored, assembled.recipe) for key in _absent(stack, range(size)))


def unmatched(assembled: AssembledTensor) -> tuple[str, ...]:
    """The recipe's patterns that no key has matched."""
    matched = {_place(tensor).source for tensor in assembled.stored}
    return tuple(
        pattern
        for index, pattern in enumerate(assembled.recipe.sources if assembled.recipe else ())
        if index not in matched
    )


def _place(tensor: StoredTensor) -> KeyMapping:
    return tensor.place or KeyMapping(name=tensor.key)


def _order(tensor: StoredTensor) -> tuple[int, int]:
    place = _place(tensor)
    return place.source, place.number


def _stacks(ordered: Stack, recipe: WeightConverter) -> Iterable[Stack]:
    if recipe.stack is None:
        return ((tensor,) for tensor in ordered)
    return (tuple(stack) for _, stack in groupby(ordered, key=lambda tensor: _place(tensor).source))


def _stacked(stack: Stack, recipe: WeightConverter) -> tuple[int, ...]:
    """Shape of what the tensors of a stack make up."""
    shape = stack[0].shape
    return shape if recipe.stack is None else (*shape[: recipe.stack], len(stack), *shape[recipe.stack :])


def _block(stack: Stack, index: int, recipe: WeightConverter, offset: int) -> Chunk:
    shape = _stacked(stack[:1], recipe)
    start = [0] * len(shape)
    if recipe.stack is not None:
        start[recipe.stack] = index
    if recipe.join is not None:
        start[recipe.join] += offset
    return Chunk(offsets=tuple(start), sizes=shape)


def _misfit(stacks: tuple[Stack, ...], recipe: WeightConverter) -> str:
    """Why ``torch.stack`` and ``torch.cat`` would refuse them, or cast them; empty where they would not."""
    first = stacks[0][0]
    for tensor in (tensor for stack in stacks for tensor in stack):
        if tensor.dtype != first.dtype:
            return f"`{first.key}` is {first.dtype}, `{tensor.key}` is {tensor.dtype}"
        if len(tensor.shape) != len(first.shape):
            return f"`{first.key}` is {list(first.shape)}, `{tensor.key}` is {list(tensor.shape)}"
    if recipe.stack is not None:
        if wrong := next((text for stack in stacks if (text := _uneven(stack))), ""):
            return wrong
        if recipe.join != recipe.stack and (absent := _unlike(stacks)):
            return f"the checkpoint lacks {', '.join(f'`{key}`' for key in absent[:3])}"
    return _unjoined(stacks, recipe)


def _uneven(stack: Stack) -> str:
    other = next((tensor for tensor in stack if tensor.shape != stack[0].shape), stack[0])
    if other is stack[0]:
        return ""
    return f"`{stack[0].key}` is {list(stack[0].shape)}, `{other.key}` is {list(other.shape)}"


def _unjoined(stacks: tuple[Stack, ...], recipe: WeightConverter) -> str:
    """What keeps the stacks from being joined."""
    shapes = [_stacked(stack, recipe) for stack in stacks]
    dims = len(shapes[0])
    if not all(0 <= dim < dims for dim in (recipe.stack, recipe.join) if dim is not None):
        return f"`{stacks[0][0].key}` is {list(stacks[0][0].shape)}, which has too few dimensions"
    for stack, shape in zip(stacks, shapes, strict=True):
        if any(shape[dim] != shapes[0][dim] for dim in range(dims) if dim != recipe.join):
            first, other = stacks[0][0], stack[0]
            return (
                f"{len(stacks[0])} like `{first.key}` are {list(shapes[0])}, "
                f"{len(stack)} like `{other.key}` are {list(shape)}"
            )
    return ""


def _unlike(stacks: tuple[Stack, ...]) -> tuple[str, ...]:
    """Keys that some of the stacks lack, by the numbers in those of the others."""
    counts = {len(stack) for stack in stacks}
    if len(stacks) == 1 or counts == {1}:  # the number in a single key is no more than a guess
        return ()
    known = [_numbers(stack) for stack in stacks]
    if all(numbers == known[0] for numbers in known):
        return ()
    every = [number for numbers in known for number in numbers]
    return tuple(key for stack in stacks for key in _absent(stack, every))


def _segment(stack: Stack) -> int | None:
    """Which segment of the keys numbers them: the last in which they differ, of a single key its last number."""
    keys = [tensor.key.split(".") for tensor in stack]
    if len({len(key) for key in keys}) > 1:
        return None
    several = [index for index, parts in enumerate(zip(*keys, strict=True)) if len(keys) == 1 or len(set(parts)) > 1]
    differ = [index for index in several if all(key[index].isdecimal() for key in keys)]
    return differ[-1] if differ else None


def _numbers(stack: Stack) -> tuple[int, ...]:
    """Of ``layers.3.experts.7.w1.weight``, beside others of that layer, 7."""
    segment = _segment(stack)
    return () if segment is None else tuple(int(tensor.key.split(".")[segment]) for tensor in stack)


def _absent(stack: Stack, numbers: Iterable[int]) -> tuple[str, ...]:
    """Keys like those of the stack with the numbers that it lacks."""
    segment = _segment(stack)
    if segment is None:
        return ()
    parts = stack[0].key.split(".")
    lacks = sorted(set(numbers) - set(_numbers(stack)))
    return tuple(".".join((*parts[:segment], str(number), *parts[segment + 1 :])) for number in lacks)
