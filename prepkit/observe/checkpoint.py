"""Where the tensors of a checkpoint belong in a live model."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from typing import Any

from attrs import define, evolve, field
from torch import nn

from prepkit.config import LoadWeights
from prepkit.facts import ModelFacts
from prepkit.facts.checkpoint import CheckpointFacts, KeyMapping, WeightConverter
from prepkit.formats.stored_weights import state_names
from prepkit.resolve.checkpoint import renamed, unreadable

# From version 5 on transformers saves many models under other names than they have, or in parts, and maps the files to
# the model when ``from_pretrained`` loads them. The library itself is asked for that mapping, as data; what follows
# does with it what ``convert_and_load_state_dict_in_model`` (``core_model_loading.py``) does, key by key. For older
# versions, and for models of other libraries, nothing is mapped.

STACKS, JOINS = "MergeModulelist", "Concatenate"
"""The operations of transformers (``torch.stack``, ``torch.cat``) that make every byte of a file one of the model."""


def mapped(found: CheckpointFacts, how: LoadWeights, model: nn.Module, facts: ModelFacts) -> CheckpointFacts:
    """The checkpoint with the place of every tensor that belongs to another name than its own, or is a part.

    The renaming that was asked for comes first, and names of the model that it gives stay. A checkpoint that holds
    nothing but the model's own names is left as it is.
    """
    if unreadable(how):
        return found
    found = evolve(found, rename=how.rename)
    names = state_names(facts)
    keys = {tensor.key: renamed(how, tensor.key) for tensor in found.tensors}
    if all(key in names for key in keys.values()) or not _maps(model):
        return found
    asked_for = {old for old, new in keys.items() if old != new and new in names}
    mapping = _mapping(model, names)
    places = mapping.places({old: new for old, new in keys.items() if old not in asked_for})
    tensors = tuple(evolve(tensor, place=places.get(tensor.key)) for tensor in found.tensors)
    return evolve(found, tensors=tensors, recipes=tuple(mapping.recipes))


def _maps(model: nn.Module) -> bool:
    """True if the model's class is one of transformers', in a version that maps what it loads."""
    known = any(
        cls.__module__ == "transformers.modeling_utils" and cls.__name__ == "PreTrainedModel"
        for cls in type(model).__mro__
    )
    return known and find_spec("transformers.conversion_mapping") is not None


@define
class _Mapping:
    """What transformers does with each key of a checkpoint."""

    model: Any
    names: dict[str, bool]
    renamings: list[Any]
    converters: list[Any]
    owners: dict[str, Any]
    """Pattern to the converter that takes its keys."""
    recipes: list[WeightConverter] = field(factory=list)
    known: dict[int, int] = field(factory=dict)
    """Identity of a converter to the index of its recipe."""

    def places(self, keys: dict[str, str]) -> dict[str, KeyMapping]:
        """Key of the file, with what it was renamed to, to its place; the order of the keys counts in stacks."""
        from transformers.core_model_loading import dot_natural_key

        taken: Counter[tuple[str, int, int]] = Counter()
        found: dict[str, KeyMapping] = {}
        for old, key in sorted(keys.items(), key=lambda pair: dot_natural_key(pair[1])):
            name, pattern = self._renamed(key)
            place = self._place(key, name, pattern)
            if place is not None:
                slot = (place.name, -1 if place.recipe is None else place.recipe, place.source)
                found[old] = evolve(place, number=0 if place.recipe is None else taken[slot])
                taken[slot] += 1
        return found

    def _renamed(self, key: str) -> tuple[str, str | None]:
        """The model's name for a key, and the pattern of the converter that takes it."""
        from transformers.core_model_loading import rename_source_key

        prefix = self.model.base_model_prefix
        name, pattern = rename_source_key(key, self.renamings, self.converters, prefix, self.names)
        if name not in self.names and key in self.names:
            name, pattern = rename_source_key(key, [], [], prefix, self.names)
        return name, pattern

    def _place(self, key: str, name: str, pattern: str | None) -> KeyMapping | None:
        if name not in self.names or (pattern is None and name == key):
            return None
        if pattern is None:
            return KeyMapping(name=name)
        converter = self.owners[pattern]
        index = self.known.setdefault(id(converter), len(self.recipes))
        if index == len(self.recipes):
            self.recipes.append(_recipe(converter))
        if self.recipes[index].others and name == key:
            return None  # it is the model's own; whether it has to be converted its shape shows
        return KeyMapping(name=name, recipe=index, source=list(converter.source_patterns).index(pattern))


def _mapping(model: Any, names: dict[str, bool]) -> _Mapping:
    """The library's own list, which it makes anew for every call, so that nothing of the model is changed."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    made = get_model_conversion_mapping(model)
    converters = [one for one in made if isinstance(one, WeightConverter)]
    return _Mapping(
        model=model,
        names=names,
        renamings=[one for one in made if isinstance(one, WeightRenaming)],
        converters=converters,
        owners={pattern: one for one in converters for pattern in one.source_patterns},
    )


def _recipe(converter: Any) -> WeightConverter:
    """A converter as data; one that does more than stack and join says what."""
    sources = tuple(converter.source_patterns)
    kinds = tuple(type(one).__name__ for one in converter.operations)
    merges = kinds == (STACKS,) and len(sources) == 1
    if len(converter.target_patterns) > 1 or not (merges or kinds in ((JOINS,), (STACKS, JOINS))):
        return WeightConverter(sources=sources, others=tuple(repr(one) for one in converter.operations))
    dims = {kind: one.dim for kind, one in zip(kinds, converter.operations, strict=True)}
    if min(dims.values()) < 0:  # counted from the end, which is another dim before stacking than after
        return WeightConverter(sources=sources, others=tuple(repr(one) for one in converter.operations))
    return WeightConverter(sources=sources, stack=dims.get(STACKS), join=dims.get(JOINS))
