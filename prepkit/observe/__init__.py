"""Live objects to facts: what a plan is made from, and what apply compares with. Reads, and changes nothing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from attrs import define, evolve, field
from torch import nn

from prepkit.config import LoadWeights
from prepkit.facts import Env, Facts, LocalFacts, ModelFacts, Observation
from prepkit.facts.checkpoint import CheckpointFacts, KeyMapping, WeightConverter
from prepkit.formats.stored_weights import observe_checkpoint, state_names
from prepkit.objects.names import Site, first_names, parameters_at, sites
from prepkit.observe.env import observe_env
from prepkit.observe.given import one_optimizer, one_scheduler, said
from prepkit.observe.loaders import loader_facts
from prepkit.observe.model import Named, model_facts
from prepkit.observe.optimizer import optimizer_facts, scheduler_facts
from prepkit.ranks.launcher import LOCAL_RANK, RANK, from_launcher
from prepkit.ranks.world import world
from prepkit.resolve.checkpoint import renamed, unreadable

__all__ = ["observe", "observe_env"]


def observe(
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    scheduler: Any = None,
    loaders: Sequence[Any] = (),
    env: Env | None = None,
    checkpoint: str | LoadWeights | None = None,
) -> Observation:
    """Facts of live objects. Linear in the number of modules and parameters; reads no tensor's data.

    ``model`` may be on the meta device, in part or whole, and may be wrapped already: its facts then carry marks, under
    the names and classes that it had before. ``env`` None: the environment that is here. ``checkpoint``: a path whose
    headers are read, see ``observe_checkpoint``, and held against the model, see ``mapped``; as ``LoadWeights`` with
    the renaming that comes before that.

    Raises ``TypeError`` for an object of the wrong kind, and ``ValueError`` for a model that contains itself.
    """
    optimizer, scheduler = one_optimizer(optimizer), one_scheduler(scheduler)
    _expect(model, scheduler, loaders)
    places = sites(model)
    named = parameters_at(places)
    first = first_names(named)
    seen = model_facts(places, named, first)
    facts = Facts(
        model=seen,
        optimizer=None if optimizer is None else optimizer_facts(optimizer, first),
        scheduler=None if scheduler is None else scheduler_facts(scheduler, optimizer),
        loaders=tuple(loader_facts(loader) for loader in loaders),
        checkpoint=None if checkpoint is None else _checkpoint(checkpoint, places[0].module, seen),
        env=observe_env() if env is None else env,
    )
    return Observation(facts=facts, local=_local(places, named, first))


def _checkpoint(asked: str | LoadWeights, model: nn.Module, seen: ModelFacts) -> CheckpointFacts:
    how = LoadWeights(asked) if isinstance(asked, str) else asked
    return mapped(observe_checkpoint(how.path), how, model, seen)


def _expect(model: object, scheduler: object, loaders: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {said(model)}; pass a torch.nn.Module, which may be on the meta device")
    if isinstance(scheduler, type) or not (scheduler is None or _steps(scheduler) or callable(scheduler)):
        raise TypeError(f"scheduler is {said(scheduler)}; pass one of torch's, or any object with step()")
    if not isinstance(loaders, Sequence):
        raise TypeError(f"loaders is {said(loaders)}; pass a tuple of loaders: loaders=(loader,)")
    for index, loader in enumerate(loaders):
        if not isinstance(loader, Iterable):
            raise TypeError(f"loaders[{index}] is {said(loader)}; pass a torch.utils.data.DataLoader")


def _steps(scheduler: object) -> bool:
    return callable(getattr(scheduler, "step", None))


def _local(places: Iterable[Site], named: Named, first: Mapping[int, str]) -> LocalFacts:
    params = (param for name, param in named if first[id(param)] == name)
    buffers = {id(b): b for site in places for b in site.module._buffers.values() if b is not None}.values()
    return LocalFacts(
        rank=world().rank if world().running else from_launcher(RANK, 0) or 0,
        local_rank=from_launcher(LOCAL_RANK, 0) or 0,
        param_devices=_devices(params),
        buffer_devices=_devices(buffers),
        host_memory=_host_memory(),
    )


def _devices(tensors: Iterable[torch.Tensor]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((str(device), n) for device, n in Counter(tensor.device for tensor in tensors).items()))


def _host_memory() -> int | None:
    """Free bytes of host memory, without what the page cache could give back; None where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf; macOS lacks the first of the two names
        return None


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
