"""What is alive when an optimizer is about to step, which of it belongs together, and the audit of that."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Collection, Container, Iterator
from itertools import count
from typing import Any

import torch
from attrs import evolve
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from prepkit.auditing.audit import audit
from prepkit.auditing.cuts import parts_alike
from prepkit.auditing.looks import (
    PUT_AROUND,
    Earlier,
    alive_now,
    put_around,
)
from prepkit.auditing.outcome import Audit
from prepkit.auditing.window import Window
from prepkit.findings import Finding
from prepkit.objects.names import named_parameters, sites
from prepkit.observe.prepared.modules import elsewhere
from prepkit.observe.prepared.optimizers import engines, inner, lent, named_as_program
from prepkit.observe.prepared.ranks import resting_apart, tied_over_stages
from prepkit.observe.prepared.schedules import steps_its_own
from prepkit.ranks.world import world


def audit_step(
    optimizer: Any,
    *,
    made: bool = True,
    window: Window | None = None,
    ask_ranks: bool = True,
    earlier: Earlier | None = None,
) -> Audit:
    """An audit of everything that is live and belongs to this optimizer, which is about to step, and of other models.

    ``made``: whether the gradients are there, and no closure is to make them first. ``window`` has heard what went
    before. ``ask_ranks``: whether all ranks are here, so that it is collective. ``earlier``: what is no part of the
    program unless it uses it.
    """
    begun = time.perf_counter()
    alive = alive_now()
    if earlier is not None and window is not None:
        alive = earlier.used(alive, optimizer, window.entered())
    roots = _roots([thing for thing in alive if isinstance(thing, nn.Module)])
    called = [] if window is None else window.called()
    model = _meant(optimizer, roots, called, alive) or _model_of(optimizer, roots)
    over = () if window is None else window.phases.over()
    optimizers = [optimizer, *(one for one in _beside(optimizer, alive, model) if one not in over)]
    scheduler = _scheduler(optimizers, alive) or next((one.lr_scheduler for one in engines(model)), None)
    heard = None if window is None else window.facts(alive, model, inner(scheduler), optimizer)
    if heard is not None:
        heard = evolve(heard, phases=evolve(heard.phases, stepped=tuple(_stepped(over, model))))
    if heard is not None and window is not None and ask_ranks and world().carries_data and not heard.communicates:
        heard = evolve(heard, rests_apart=resting_apart(_beside_model(model, window.entered())))
    if heard is not None and window is not None and ask_ranks and world().carries_data:
        heard = evolve(heard, tied_over=tied_over_stages(model, window.inputs.looked_up()))
        alike = parts_alike(model)
        heard = evolve(heard, parts_alike=() if window.cuts.draws else tuple(alike.items()))
    loaders, awaited = _loaders(alive), () if window is None else window.awaited
    found = audit(
        model, optimizers, scheduler, loaders, ask_ranks=ask_ranks, at_step=made, window=heard, awaited=awaited
    )
    others = () if window is None else tuple(_of_others(model, roots, alive, called, ask_ranks=ask_ranks))
    return evolve(found, findings=found.findings + others, seconds=time.perf_counter() - begun)


def _beside_model(model: nn.Module, entered: list[nn.Module]) -> list[nn.Module]:
    """Modules that were called and share no parameter with it."""
    mine = {id(param) for param in model.parameters()}
    return [one for one in entered if mine.isdisjoint(map(id, one.parameters()))]


OF_OTHERS = frozenset(
    f"run.{name}"
    for name in (
        *("orphans", "state-lost", "state-misfit", "state-not-finite", "rate-not-finite", "nan", "infinite"),
        *("left-on-meta", "no-master-weights", "unlike-dtypes", "negative-variance", "hidden-module"),
        *("unread-setting", "ranks-models", "ranks-optimizers", "ranks-values", "ranks-state", "drops-all"),
    )
)
"""Rules that hold for a model while another one is stepped: it may rest, be frozen or evaluate meanwhile."""


def _of_others(
    model: nn.Module, roots: list[nn.Module], alive: list[Any], called: list[nn.Module], *, ask_ranks: bool
) -> Iterator[Finding]:
    """Findings of other living models that an optimizer of their own is to step."""
    known = {id(param) for param in model.parameters()}
    living = {id(param) for root in roots for param in root.parameters()}
    pairs: dict[int, tuple[nn.Module, list[Any]]] = {}
    for one in alive:
        if not isinstance(one, torch.optim.Optimizer) or inner(one) is not one or not one.param_groups:
            continue
        held = {id(param) for group in one.param_groups for param in group["params"]}
        root = max(roots, key=lambda root: sum(id(param) in held for param in root.parameters()), default=None)
        if not held & living and (meant := _meant(one, roots, called, alive)) is not model:
            root = meant  # it holds what nobody else does any more
        elif root is not None and (held & known or not any(id(param) in held for param in root.parameters())):
            continue
        if root is not None:
            pairs.setdefault(id(root), (root, []))[1].append(one)
    told = [(type(root).__name__, len(optimizers)) for root, optimizers in pairs.values()]
    alike = ask_ranks and world().same(told)
    for root, optimizers in pairs.values():
        found = audit(root, optimizers, ask_ranks=alike, awaited=())
        for finding in found.findings:
            if finding.rule in OF_OTHERS:
                yield evolve(finding, where=f"{type(root).__name__}: {finding.where}")


def _meant(optimizer: Any, roots: list[nn.Module], called: list[nn.Module], alive: list[Any]) -> nn.Module | None:
    """The model that an optimizer was to step, as it seems, where it holds nothing that was called; None: no other.

    One with gradients that no optimizer holds, of parameters that are mostly like what this one holds: masters of a
    program's own are of another dtype or device.
    """
    slots = [param for group in optimizer.param_groups for param in group["params"]]
    ran = {id(param): param for module in called for param in module.parameters()}
    if any(id(slot) in ran or slot.grad is not None for slot in slots):
        return None
    others = [one for one in alive if isinstance(one, torch.optim.Optimizer)]
    held = {id(param) for one in others for group in one.param_groups for param in group["params"]}
    kinds = Counter(map(_kind, slots))
    for root in roots:
        free = [one for one in root.parameters() if id(one) in ran and id(one) not in held and one.grad is not None]
        if 2 * (kinds & Counter(map(_kind, free))).total() > max(kinds.total(), len(free)):
            return root
    return None


def _kind(param: torch.Tensor) -> tuple[object, ...]:
    return tuple(param.shape), param.dtype, param.device


def _roots(modules: list[nn.Module]) -> list[nn.Module]:
    """Modules with parameters that stand in no other one."""
    modules = [module for module in modules if module not in PUT_AROUND]
    inside = {id(child) for module in modules for child in module._modules.values() if child is not None}
    return [module for module in modules if id(module) not in inside and next(module.parameters(), None) is not None]


def _model_of(optimizer: Any, roots: list[nn.Module]) -> nn.Module:
    """The root with most gradients that the optimizer steps; else most parameters that it holds or that have gradients.

    Together with other roots, and tensors that stand in none, of which it steps gradients.
    """
    slots = {id(param): param for group in optimizer.param_groups for param in group["params"]}
    live = {key for key, param in slots.items() if param.grad is not None}

    def weight(root: nn.Module) -> tuple[int, ...]:
        params = list(root.parameters())
        held = {id(param) for param in params} & slots.keys()
        known = sum(id(param) in slots or param.grad is not None for param in params)
        return len(held & live), known, len(held), len(params)

    model = _held_around(max(roots, key=weight, default=nn.Module()), roots, slots)
    rests = bool(live) and not any(weight(model)[:2]) and not engines(model)  # an engine steps masters of its own
    if rests:
        model = nn.Module()  # as where ``functional_call`` lends it weights
    parts = {type(model).__name__: model} if any(weight(model)) else {}
    known = {id(param) for param in model.parameters()}
    for root in roots:
        own = {id(param) for param in root.parameters()}
        if root is not model and own & live - known:
            parts[_free(type(root).__name__, parts)] = root
            known |= own
    loose = [slots[key] for key in slots if key in live - known and (rests or isinstance(slots[key], nn.Parameter))]
    loose = [one for one in loose if not any(lent(one, part) for part in parts.values())]
    if loose:
        beside = put_around(nn.Module())
        beside._parameters.update(named_as_program(loose))
        parts[_free("beside", parts)] = beside
    return next(iter(parts.values())) if len(parts) == 1 else put_around(nn.ModuleDict(parts))


def _held_around(model: nn.Module, roots: list[nn.Module], slots: Collection[int]) -> nn.Module:
    """A root that the optimizer holds and whose forward runs this one, of which it holds nothing; else this one."""
    if any(id(param) in slots for param in model.parameters()):
        return model
    known = {id(one) for one in model.modules()}
    held = (root for root in roots if any(id(param) in slots for param in root.parameters()))
    return next((root for root in held if elsewhere(sites(root), known)), model)


def _free(name: str, taken: Container[str]) -> str:
    return next(one for at in count(1) if (one := name if at == 1 else f"{name}_{at}") not in taken)


def _beside(optimizer: Any, alive: list[Any], model: nn.Module) -> list[Any]:
    """Other optimizers that hold parameters of the model which this one does not hold."""
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    rest = {id(param) for param in model.parameters()} - held
    others = (one for one in alive if isinstance(one, torch.optim.Optimizer) and one is not optimizer)
    return [
        one
        for one in others
        if inner(one) is one and any(id(param) in rest for group in one.param_groups for param in group["params"])
    ]


def _stepped(over: Collection[Any], model: nn.Module) -> Iterator[str]:
    """Yield parameters of a model that optimizers hold whose training is over: that is nobody's turn now."""
    held = {id(param) for one in over for group in one.param_groups for param in group["params"]}
    yield from (name for name, param in named_parameters(model).items() if id(param) in held)


def _scheduler(optimizers: list[Any], alive: list[Any]) -> Any:
    """The scheduler that drives one of them, in accelerate's wrapper where it has one; else the only one there is."""
    every = [one for one in alive if isinstance(one, LRScheduler)]
    within = {id(part) for one in every for part in getattr(one, "_schedulers", ())}
    outer = [one for one in every if id(one) not in within]
    own = [one for one in outer if inner(one.optimizer) is optimizers[0]]
    driving = own or [one for one in outer if any(inner(one.optimizer) is optimizer for optimizer in optimizers)]
    chosen = driving or (outer if len(outer) == 1 and not steps_its_own(outer[0]) else [])
    owners = gc.get_referrers(chosen[-1]) if chosen else ()
    holders = (one for owner in owners for one in (owner, *(gc.get_referrers(owner) if type(owner) is dict else ())))
    wrappers = (one for one in holders if type(one).__name__ == "AcceleratedScheduler")
    return next(wrappers, chosen[-1] if chosen else None)


def _loaders(alive: list[Any]) -> list[Any]:
    """The loaders that are being iterated, in accelerate's wrapper where they have one.

    One that was written into the ``for`` itself is gone once it runs: its like is made from what reads.
    """
    passes = {_reads(one._dataset, one._index_sampler): one for one in alive if isinstance(one, _BaseDataLoaderIter)}
    loaders = [one for one in alive if isinstance(one, DataLoader)]
    wrapped = {id(vars(one).get("base_dataloader")) for one in loaders}
    known = {_reads(_base(one).dataset, _base(one)._index_sampler) for one in loaders}
    found = [
        one
        for one in loaders
        if id(one) not in wrapped and _reads(_base(one).dataset, _base(one)._index_sampler) in passes
    ]
    return found + [like(one) for place, one in passes.items() if place not in known]


def _reads(dataset: Any, sampler: Any) -> tuple[int, int]:
    return id(dataset), id(sampler)


def like(reading: Any) -> DataLoader[Any]:
    """A loader that reads as this pass does. Nothing is drawn from it."""
    data, sampler = reading._dataset, reading._index_sampler
    if type(sampler) is not BatchSampler:
        return DataLoader(data, batch_sampler=sampler)
    if isinstance(data, IterableDataset):
        return DataLoader(data, batch_size=sampler.batch_size, drop_last=sampler.drop_last)
    return DataLoader(data, batch_size=sampler.batch_size, sampler=sampler.sampler, drop_last=sampler.drop_last)


def _base(loader: Any) -> Any:
    return vars(loader).get("base_dataloader", loader)
