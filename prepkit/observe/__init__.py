"""Live objects to facts: what a plan is made from, and what apply compares with. Reads, and changes nothing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from prepkit.config import LoadWeights
from prepkit.facts import Env, Facts, LocalFacts, ModelFacts, Observation
from prepkit.facts.checkpoint import CheckpointFacts
from prepkit.formats.stored_weights import observe_checkpoint
from prepkit.objects.names import Site, first_names, parameters_at, sites
from prepkit.observe.checkpoint import mapped
from prepkit.observe.env import observe_env
from prepkit.observe.given import one_optimizer, one_scheduler, said
from prepkit.observe.loaders import loader_facts
from prepkit.observe.model import Named, model_facts
from prepkit.observe.optimizer import optimizer_facts, scheduler_facts
from prepkit.ranks.launcher import LOCAL_RANK, RANK, from_launcher
from prepkit.ranks.world import world

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
