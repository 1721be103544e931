"""Which tensors of a checkpoint become which tensor of the model, and what a model can initialize by itself.

Arithmetic on facts that rules and planner share, linear in the number of tensors. A checkpoint has *keys*, the model
has *names*: ``rename`` of ``LoadWeights`` turns keys into names. Where the model's library stores a tensor in several
parts, a ``KeyMapping`` says which name a key is a part of, and a ``WeightConverter`` how the parts are joined.

A mixture of experts may be stored as one matrix per expert and projection, and be one tensor in the model. A
converter says how: the tensors of each of its sources are *stacked* in a new dimension, in the order of the numbers in
their keys, and the stacks of all sources are *joined* along another. What is not stacked is a stack of one tensor. That
is arithmetic on shapes, after ``torch.stack`` and ``torch.cat``, which transformers calls for ``MergeModulelist`` and
``Concatenate`` (``core_model_loading.py``).

Regular expressions that take exponential time are found before any name is held against them: Python's ``re`` tries
every way to divide a text among repeats and alternatives, and has no time limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import log10
from typing import Any

from attrs import evolve, frozen

from prepkit.config import Config, InitWeights, LoadWeights
from prepkit.facts import Facts, ModelFacts
from prepkit.facts.checkpoint import CheckpointFacts, KeyMapping, StoredTensor, WeightConverter
from prepkit.resolve.modules import parent
from prepkit.steps import Chunk

# --- parts -----------------------------------------------------------------------------------------------------------


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
    """Return what keeps the stacks from being joined."""
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
    if {len(stack) for stack in stacks} == {1}:  # the number in a single key is no more than a guess
        return ()
    known = [_numbers(stack) for stack in stacks]
    if all(numbers == known[0] for numbers in known):
        return ()
    every = [number for numbers in known for number in numbers]
    return tuple(key for stack in stacks for key in _absent(stack, every))


def _segment(stack: Stack) -> int | None:
    """Return which segment of the keys numbers them: the last in which they differ, of a single key its last number."""
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


# --- cost of renaming ------------------------------------------------------------------------------------------------


LONGEST = 1000
"""Characters of an expression or of a replacement."""

ENDLESS = 100
"""Ways in which a repeat without end can end in a name: about as many as the name has characters."""

MOST = 8.5
"""Decimal digits of the number of ways that are still tried: four repeats without end, beside each other."""


def cost(pattern: str, replacement: str) -> str:
    """Why a pair of ``rename`` could take longer than anybody waits; empty where it cannot.

    Raises ``re.error`` for what is no regular expression.

    >>> cost("^layers[.](.*)[.]gamma$", "weight")
    ''
    >>> cost("(a+)+$", "")
    'too costly: ... Write no repeat inside a repeat, at most four without end, and several pairs in place of one'
    """
    if len(pattern) > LONGEST or len(replacement) > LONGEST:
        return f"too long: at most {LONGEST} characters each. Write several pairs in place of one"
    re.compile(pattern)  # says what is wrong with it
    from re import _parser  # type: ignore[attr-defined]  # the tree has no public reader

    if _digits(_parser.parse(pattern)) <= MOST:
        return ""
    many = "a name can be divided among its repeats in more than 10**8 ways, and each is tried"
    instead = "Write no repeat inside a repeat, at most four without end, and several pairs in place of one"
    return f"too costly: {many}. {instead}"


def _digits(tree: Any) -> float:
    """Decimal digits of the number of ways to match a tree: ways multiply, so their digits add up."""
    return sum(_of_node(str(op), value) for op, value in tree)


def _of_node(op: str, value: Any) -> float:
    inner = sum(_digits(tree) for tree in _trees(value))
    if op.endswith("_REPEAT"):
        low, high, _ = value
        rounds = min(int(high), ENDLESS)
        return rounds * inner + log10(max(1, rounds - min(int(low), rounds) + 1) if low != high else 1)
    if op == "BRANCH":
        return inner + log10(len(value[1]))
    return inner


def _trees(value: Any) -> Iterator[Any]:
    """The trees in what a node holds: groups, repeats, alternatives and lookarounds hold them at different places."""
    if hasattr(value, "getwidth"):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _trees(item)


LONGEST_NAME = 300
"""Characters of a name that ``rename`` still looks at; those of models have a hundred or two."""


@frozen(kw_only=True)
class CheckpointMatch:
    """A checkpoint held against a model."""

    assembled: tuple[AssembledTensor, ...]
    """What each parameter and persistent buffer is read from; a tied one under its first name."""
    missing: tuple[str, ...]
    """Names that the checkpoint has under none of their ties."""
    unexpected: tuple[str, ...]
    """Keys that are no parameter, no buffer and no tie of the model, nor a part of one."""
    tied_twice: tuple[tuple[str, str], ...]
    """Of tied parameters that the checkpoint holds under several keys: the key that is read, and one that is not."""
    ambiguous: tuple[tuple[str, tuple[str, ...]], ...]
    """Names that several tensors stand for, each as a whole, or one as a whole and others in parts; with the keys."""
    converted: tuple[tuple[str, str], ...]
    """Keys that the model's library converts as it loads them, each with its operations: they are not read."""


def match(model: ModelFacts, checkpoint: CheckpointFacts) -> CheckpointMatch:
    """Each tensor of the model with those of the checkpoint that it is read from.

    Keys are names of the model, as in a state dict, unless a key mapping says which name they are a part of.
    """
    tensors_of = _by_name(checkpoint)
    tied = {group[0]: group for group in model.ties}
    wanted = [*(param.name for param in model.params), *(buffer.name for buffer in model.buffers if buffer.persistent)]
    assembled: dict[str, AssembledTensor] = {}
    tied_twice: list[tuple[str, str]] = []
    for name in wanted:
        keys = [key for key in tied.get(name, (name,)) if key in tensors_of]
        if keys:
            assembled[name] = _assembled(name, tensors_of[keys[0]], checkpoint.recipes)
            tied_twice.extend((keys[0], key) for key in keys[1:])
    known = {*wanted, *(buffer.name for buffer in model.buffers), *(name for group in model.ties for name in group)}
    return CheckpointMatch(
        assembled=tuple(assembled.values()),
        missing=tuple(name for name in wanted if name not in assembled),
        unexpected=tuple(t.key for name, tensors in tensors_of.items() if name not in known for t in tensors),
        tied_twice=tuple(tied_twice),
        ambiguous=tuple(
            (name, tuple(tensor.key for tensor in tensors))
            for name, tensors in tensors_of.items()
            if _is_ambiguous(tensors)
        ),
        converted=tuple(
            (tensor.key, ", ".join(converter.others))
            for tensor in checkpoint.tensors
            if (converter := _converter(tensor, checkpoint.recipes)) is not None and converter.others
        ),
    )


def _by_name(checkpoint: CheckpointFacts) -> dict[str, list[StoredTensor]]:
    """Name in the model to the tensors that stand for it; what no key mapping places stands under its key.

    So does what the library would change in a way that is not joining and stacking (``others``): it is not read.
    """
    tensors_of: dict[str, list[StoredTensor]] = {}
    for tensor in checkpoint.tensors:
        tensors_of.setdefault(_name_of(tensor, checkpoint.recipes), []).append(tensor)
    return tensors_of


def _name_of(tensor: StoredTensor, converters: tuple[WeightConverter, ...]) -> str:
    converter = _converter(tensor, converters)
    if tensor.place is None or (converter is not None and converter.others):
        return tensor.key
    return tensor.place.name


def _converter(tensor: StoredTensor, converters: tuple[WeightConverter, ...]) -> WeightConverter | None:
    """How the tensor becomes a part of another; None: it is the whole, as where a bent plan file names no converter."""
    index = None if tensor.place is None else tensor.place.recipe
    return converters[index] if index is not None and 0 <= index < len(converters) else None


def _is_ambiguous(tensors: list[StoredTensor]) -> bool:
    """Return whether the tensors are more than the parts of one."""
    indices = {None if tensor.place is None else tensor.place.recipe for tensor in tensors}
    return len(tensors) > 1 and (len(indices) > 1 or None in indices)


def _assembled(name: str, tensors: list[StoredTensor], converters: tuple[WeightConverter, ...]) -> AssembledTensor:
    """From the tensors that are converted as the first one is; the others are said to be ambiguous."""
    converter = _converter(tensors[0], converters)
    return assemble(name, [tensor for tensor in tensors if _converter(tensor, converters) is converter], converter)


def requested_checkpoint(cfg: Config, facts: Facts) -> CheckpointFacts | None:
    """The checkpoint that the config loads, where it was seen, with its keys renamed as the config says.

    None where nothing is loaded, and where the facts are about another path or about no checkpoint.

    The facts may have been gathered under another ``rename``. A key mapping found then holds for the key as it was
    renamed then, so it is kept only where the config now renames the key to the same name; else the key has none.
    """
    seen, how = facts.checkpoint, cfg.weights
    if not isinstance(how, LoadWeights) or seen is None or seen.path != how.path:
        return None
    same = seen.rename == how.rename
    if unreadable(how) or (same and not how.rename):
        return seen
    tensors = []
    for tensor in seen.tensors:
        key = renamed(how, tensor.key)
        holds = same or (not seen.rename and key == tensor.key)
        tensors.append(evolve(tensor, key=key, place=tensor.place if holds else None))
    return evolve(seen, tensors=tuple(tensors))


def renamed(how: LoadWeights, key: str) -> str:
    """The name in the model that a key of the checkpoint stands for.

    A name of more than ``LONGEST_NAME`` characters is renamed no further: it is no model's, and costs without bound.

    >>> renamed(LoadWeights("x", rename=(("^policy[.]", ""), ("[.]gamma$", ".weight"))), "policy.norm.gamma")
    'norm.weight'
    """
    for pattern, replacement in how.rename:
        if len(key) > LONGEST_NAME:
            break
        key = re.sub(pattern, replacement, key)
    return key


def unreadable(how: LoadWeights) -> tuple[tuple[str, str], ...]:
    """The pairs of ``rename`` that are no regular expression and replacement, or cost too much, each with why."""
    reasons = []
    for pattern, replacement in how.rename:
        try:
            if why := cost(pattern, replacement):
                reasons.append((pattern, why))
                continue
            re.sub(f"(?:{pattern})|", replacement, "")
        except (re.error, IndexError, RecursionError, OverflowError) as error:
            reasons.append((pattern, f"no regular expression: {error}"))
    return tuple(reasons)


def initialized_params(cfg: Config, model: ModelFacts, checkpoint: CheckpointMatch | None) -> tuple[str, ...]:
    """Names of the parameters that get their values from initializers: all, those that a checkpoint lacks, or none."""
    names = tuple(param.name for param in model.params)
    if isinstance(cfg.weights, InitWeights):
        return names
    missing = set(checkpoint.missing) if checkpoint else set()
    return tuple(name for name in names if name in missing)


def computed_buffers(cfg: Config, model: ModelFacts, checkpoint: CheckpointMatch | None) -> tuple[str, ...]:
    """Names of the buffers that are in no checkpoint: where they are on meta, the model has to compute them.

    None where the model keeps its own values, or rank 0 sends them.
    """
    names = tuple(buffer.name for buffer in model.buffers)
    if isinstance(cfg.weights, InitWeights):
        return names
    if checkpoint is None:
        return ()
    read = {tensor.name for tensor in checkpoint.assembled}
    return tuple(name for name in names if name not in read)


def without_initializer(model: ModelFacts, names: Iterable[str]) -> tuple[str, ...]:
    """Those of the tensors whose module has no ``reset_parameters``, nor an ``_init_weights`` in or above it."""
    resets = {module.path for module in model.modules if model.classes[module.cls].resets}
    inits = {module.path for module in model.modules if model.classes[module.cls].inits}
    return tuple(name for name in names if parent(name) not in resets and not _is_under(parent(name), inits))


def _is_under(path: str, roots: set[str]) -> bool:
    while path and path not in roots:
        path = parent(path)
    return path in roots
