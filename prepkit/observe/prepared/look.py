"""One look at a prepared model, whoever has prepared it: the facts that the rules which are due ask for."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import nn

from prepkit.facts import Env
from prepkit.facts.run import RunFacts
from prepkit.objects.joint_optimizer import members
from prepkit.objects.names import first_names, parameters_at, sites
from prepkit.observe.env import observe_env
from prepkit.observe.given import said
from prepkit.observe.model import model_facts
from prepkit.observe.preparation import preparation
from prepkit.observe.prepared import averaging, fabric, modules
from prepkit.observe.prepared.gradients import gradients
from prepkit.observe.prepared.inside import with_inside
from prepkit.observe.prepared.loaders import language_config, prepared_loader
from prepkit.observe.prepared.optimizers import (
    accumulation,
    engine_facts,
    inner,
    prepared_optimizer,
    prepared_scheduler,
)
from prepkit.observe.prepared.ranks import compared
from prepkit.observe.prepared.unread import hidden, unread
from prepkit.ranks.launcher import from_launcher
from prepkit.ranks.world import world
from prepkit.rules.rule import Need

__all__ = ["look", "optimizers_of"]


BEFORE_A_STEP = frozenset(Need) - {Need.GRADIENTS, Need.LOOP, Need.BEFORE}
"""What can be seen of prepared objects that nobody is about to step."""


def look(
    model: nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    loaders: Sequence[Any] = (),
    *,
    needs: Collection[Need] = BEFORE_A_STEP,
    env: Env | None = None,
) -> RunFacts:
    """Observe prepared objects. Draws nothing, and reads values of tensors only for ``VALUES``, ``STATE``, ``RANKS``.

    ``needs``: gather what the rules that are due ask for, and leave the rest at its default; the structure of the model
    is always seen. ``Need.GRADIENTS``: the optimizers are about to step. Collective with ``Need.RANKS``: one exchange.
    Raises ``TypeError`` for objects of the wrong kind and ``ValueError`` for a model that contains itself.
    """
    optimizers = optimizers_of(optimizer)
    _expect(model, scheduler, loaders)
    around, model, loaders = fabric.autocast_of(model), fabric.module_of(model), [*map(fabric.loader_of, loaders)]
    with torch.no_grad():
        facts, places = _alone(model, optimizers, loaders, needs)
        first = first_names(parameters_at(places))
        here = evolve(observe_env(), world_size=facts.world_size) if env is None else env
        how = preparation(model, places, facts.model, first, optimizers, here, around)
        facts = evolve(facts, preparation=how)
        if scheduler is not None and Need.OPTIMIZERS in needs:
            facts = evolve(facts, scheduler=prepared_scheduler(scheduler, optimizers))
        seen = Need.GRADIENTS in needs and facts.engine is None  # DeepSpeed keeps gradients where nobody sees them
        stepped = [*gradients(model, optimizers)] if seen else None
        if seen or Need.RANKS in needs:
            facts = compared(facts, places, optimizers, stepped, asks=Need.RANKS in needs)
    return facts if env is None else evolve(facts, world_size=env.world_size)


def _alone(
    model: nn.Module, optimizers: list[Any], loaders: Sequence[Any], needs: Collection[Need]
) -> tuple[RunFacts, list[Any]]:
    """Return what one rank sees by itself."""
    places = sites(model)
    named = parameters_at(places)
    first = first_names(named)
    once = {name: param for name, param in named if first[id(param)] == name}
    dropout = modules.dropping(places)
    ranks = world()
    facts = RunFacts(
        model=model_facts(places, named, first),
        params=averaging.prepared_params(model, once),
        wrapped=modules.wrapped(places),
        ddp=averaging.ddp_facts(model, first),
        units=modules.units(places),
        engine=engine_facts(model),
        training=places[0].module.training,
        evaluating=modules.evaluating(places, dropout) if places[0].module.training else (),
        dropout=dropout,
        drops=modules.drops(model),
        normalised=modules.normalised(places),
        drops_all=modules.dropping_all(places),
        unaveraged=averaging.unaveraged(places),
        elsewhere=modules.elsewhere(places),
        compile_off=_compile_off(),
        accumulation=accumulation(model, *optimizers, *loaders),
        world_size=ranks.size,
        rank=ranks.rank,
        backend=ranks.backend,
    )
    if Need.OPTIMIZERS in needs:
        state = Need.STATE in needs
        facts = evolve(
            facts, optimizers=tuple(prepared_optimizer(one, model, first, state=state) for one in optimizers)
        )
    if Need.LOADERS in needs:
        config = language_config(places[0].module)
        facts = evolve(facts, loaders=tuple(prepared_loader(one, config) for one in loaders))
    facts = evolve(facts, **with_inside(facts, places), unread=unread(places, optimizers, loaders))
    facts = evolve(facts, hidden=hidden(places, optimizers), launched=_launched())
    return (_with_values(facts, model, places, once) if Need.VALUES in needs else facts), places


def _launched() -> int:
    """Processes that torchrun or its like says it has started."""
    return (from_launcher(("WORLD_SIZE",), 1) or 1) if from_launcher(("RANK",), 0) is not None else 1


def _with_values(facts: RunFacts, model: nn.Module, places: list[Any], once: dict[str, nn.Parameter]) -> RunFacts:
    """With what is wrong with the numbers in parameters and buffers. Reads each once, and waits for the device."""
    tensors = {**once, **{name: tensor for name, tensor in model.named_buffers() if tensor is not None}}
    return evolve(
        facts,
        nan=modules.with_nan(tensors),
        infinite=modules.infinite(once),
        negative=modules.negative(places),
        zeros=modules.zeros(once),
    )


def optimizers_of(given: Any) -> list[Any]:
    """The optimizers that were given, those of a joint one each. Raises ``TypeError`` for what is none."""
    listed = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    for index, one in enumerate(listed):
        if not (hasattr(inner(one), "param_groups") and hasattr(one, "step")):
            where = f"optimizer[{index}]" if isinstance(given, list | tuple) else "optimizer"
            raise TypeError(f"{where} is {said(one)}; pass an optimizer of torch, accelerate or DeepSpeed")
    each = [member for one in listed for member in (members(one) if isinstance(one, torch.optim.Optimizer) else (one,))]
    return [*{id(inner(one).param_groups): one for one in reversed(each)}.values()][::-1]  # a wrapper shares the groups


def _expect(model: object, scheduler: object, loaders: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {said(model)}; pass the prepared torch.nn.Module, wrappers included")
    if isinstance(scheduler, list | tuple):
        what = f"scheduler is a {type(scheduler).__name__} of {len(scheduler)}"
        raise TypeError(f"{what}; pass one scheduler, and audit again with another: scheduler=schedulers[0]")
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise TypeError(f"scheduler is {said(scheduler)}; pass one of torch's, accelerate's, or any with step()")
    if not isinstance(loaders, list | tuple):
        raise TypeError(f"loaders is {said(loaders)}; pass a tuple of loaders: loaders=(loader,)")


def _compile_off() -> bool:
    config = sys.modules.get("torch._dynamo.config")
    return bool(config is not None and getattr(config, "disable", False))
