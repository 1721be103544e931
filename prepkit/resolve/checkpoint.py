"""Which tensor of a checkpoint fills which of the model, and what a model can initialise by itself.

Sums on facts that rules and planner share, linear in the number of tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from attrs import evolve, frozen

from prepkit.config import Config, InitWeights, LoadWeights
from prepkit.facts import Facts, ModelFacts
from prepkit.facts.checkpoint import CheckpointFacts, StoredTensor, WeightConverter
from prepkit.resolve.checkpoint_parts import AssembledTensor, assemble
from prepkit.resolve.modules import parent


@frozen(kw_only=True)
class Match:
    """A checkpoint held against a model."""

    found: tuple[AssembledTensor, ...]
    """What fills each parameter and persistent buffer; a tied one under its first name."""
    missing: tuple[str, ...]
    """Names that the checkpoint has under none of their ties."""
    unexpected: tuple[str, ...]
    """Keys that are no parameter, no buffer and no tie of the model, nor a part of one."""
    twice: tuple[tuple[str, str], ...]
    """Of tied parameters that the checkpoint holds under several keys: the key that is read, and one that is not."""
    doubled: tuple[tuple[str, tuple[str, ...]], ...]
    """Names that several tensors fill, each as a whole, or one as a whole and others in parts; with the keys."""
    converted: tuple[tuple[str, str], ...]
    """Keys that the model's library converts as it loads them, each with its operations: they are not read."""


def match(model: ModelFacts, checkpoint: CheckpointFacts) -> Match:
    """What the checkpoint fills: names of the model are its keys, as in a state dict, unless they have a place."""
    stored = _claims(checkpoint)
    tied = {group[0]: group for group in model.ties}
    wanted = [*(param.name for param in model.params), *(buffer.name for buffer in model.buffers if buffer.persistent)]
    found: list[AssembledTensor] = []
    twice: list[tuple[str, str]] = []
    for name in wanted:
        keys = [key for key in tied.get(name, (name,)) if key in stored]
        if keys:
            found.append(_filled(name, stored[keys[0]], checkpoint.recipes))
            twice.extend((keys[0], key) for key in keys[1:])
    there = {one.name for one in found}
    known = {*wanted, *(buffer.name for buffer in model.buffers), *(name for group in model.ties for name in group)}
    return Match(
        found=tuple(found),
        missing=tuple(name for name in wanted if name not in there),
        unexpected=tuple(one.key for name, some in stored.items() if name not in known for one in some),
        twice=tuple(twice),
        doubled=tuple((name, tuple(one.key for one in some)) for name, some in stored.items() if _doubled(some)),
        converted=tuple(
            (one.key, ", ".join(recipe.others))
            for one in checkpoint.tensors
            if (recipe := _recipe(one, checkpoint.recipes)) is not None and recipe.others
        ),
    )


def _claims(checkpoint: CheckpointFacts) -> dict[str, list[StoredTensor]]:
    """Name in the model to the tensors that fill it; what fills none under its key."""
    claims: dict[str, list[StoredTensor]] = {}
    for one in checkpoint.tensors:
        recipe = _recipe(one, checkpoint.recipes)
        placed = one.place is not None and not (recipe and recipe.others)
        claims.setdefault(one.place.name if one.place and placed else one.key, []).append(one)
    return claims


def _recipe(one: StoredTensor, recipes: tuple[WeightConverter, ...]) -> WeightConverter | None:
    """How the tensor is made a part of another; None: it is the whole, also where a bent plan file names no recipe."""
    index = None if one.place is None else one.place.recipe
    return recipes[index] if index is not None and 0 <= index < len(recipes) else None


def _doubled(some: list[StoredTensor]) -> bool:
    """Whether the tensors are more than the parts of one."""
    ways = {None if one.place is None else one.place.recipe for one in some}
    return len(some) > 1 and (len(ways) > 1 or None in ways)


def _filled(name: str, some: list[StoredTensor], recipes: tuple[WeightConverter, ...]) -> AssembledTensor:
    """From the tensors that take the same way as the first."""
    recipe = _recipe(some[0], recipes)
    return assemble(name, [one for one in some if _recipe(one, recipes) is recipe], recipe)


def asked(cfg: Config, facts: Facts) -> CheckpointFacts | None:
    """The checkpoint that the config loads, where it was seen, with its keys renamed as the config says.

    A key that the config renames has the place that was found after that renaming, if it was, and else none.
    """
    there, how = facts.checkpoint, cfg.weights
    if not isinstance(how, LoadWeights) or there is None or there.path != how.path:
        return None
    same = there.rename == how.rename
    if unreadable(how) or (same and not how.rename):
        return there
    tensors = []
    for one in there.tensors:
        key = renamed(how, one.key)
        kept = same or (not there.rename and key == one.key)
        tensors.append(evolve(one, key=key, place=one.place if kept else None))
    return evolve(there, tensors=tuple(tensors))


def renamed(how: LoadWeights, key: str) -> str:
    """The name in the model that a key of the checkpoint stands for.

    >>> renamed(LoadWeights("x", rename=(("^policy[.]", ""), ("[.]gamma$", ".weight"))), "policy.norm.gamma")
    'norm.weight'
    """
    for pattern, replacement in how.rename:
        key = re.sub(pattern, replacement, key)
    return key


def unreadable(how: LoadWeights) -> tuple[tuple[str, str], ...]:
    """The pairs of ``rename`` that are no regular expression and replacement, each with why."""
    found = []
    for pattern, replacement in how.rename:
        try:
            re.compile(pattern)
            re.sub(f"(?:{pattern})|", replacement, "")
        except (re.error, IndexError) as error:
            found.append((pattern, str(error)))
    return tuple(found)


def initialised(cfg: Config, facts: Facts) -> tuple[str, ...]:
    """Names of the parameters that get their values from initialisers: all, those that a checkpoint lacks, or none."""
    names = tuple(param.name for param in facts.model.params)
    match cfg.weights:
        case InitWeights():
            return names
        case LoadWeights() if (checkpoint := asked(cfg, facts)) is not None:
            missing = set(match(facts.model, checkpoint).missing)
            return tuple(name for name in names if name in missing)
        case _:
            return ()


def computed(cfg: Config, facts: Facts) -> tuple[str, ...]:
    """Names of the buffers that no checkpoint fills: where they are on meta, the model has to compute them."""
    names = tuple(buffer.name for buffer in facts.model.buffers)
    match cfg.weights:
        case InitWeights():
            return names
        case LoadWeights() if (checkpoint := asked(cfg, facts)) is not None:
            filled = {one.name for one in match(facts.model, checkpoint).found}
            return tuple(name for name in names if name not in filled)
        case _:
            return ()


def helpless(model: ModelFacts, names: Iterable[str]) -> tuple[str, ...]:
    """Those of the tensors whose module has no ``reset_parameters``, nor an ``_init_weights`` in or above it."""
    able = {module.path for module in model.modules if model.classes[module.cls].resets}
    above = {module.path for module in model.modules if model.classes[module.cls].inits}
    return tuple(name for name in names if parent(name) not in able and not _under(parent(name), above))


def _under(path: str, above: set[str]) -> bool:
    while path and path not in above:
        path = parent(path)
    return path in above
