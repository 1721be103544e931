"""A model that something else has prepared, as facts, and what is wrong with it. Looks only, and changes nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch import nn

from prepkit.auditing import Audit, findings_of
from prepkit.facts import Env
from prepkit.facts.prepared import PreparedFacts
from prepkit.live.audit import averaging, fabric, modules
from prepkit.live.audit.gradients import gradients_at_step
from prepkit.live.audit.loaders import prepared_loader
from prepkit.live.audit.optimizers import accumulation, engine_facts, inner, prepared_optimizer, prepared_scheduler
from prepkit.live.audit.preparation import preparation
from prepkit.live.audit.ranks import compared
from prepkit.live.audit.running import RunningLook
from prepkit.live.model.joint_optimizer import members
from prepkit.live.model.names import first_names, parameters_at, sites
from prepkit.live.observe.env import observe_env
from prepkit.live.observe.given import said
from prepkit.live.observe.model import model_facts

__all__ = ["audit", "look", "optimizers_of"]


def audit(
    model: nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    loaders: Sequence[Any] = (),
    *,
    env: Env | None = None,
    ask_ranks: bool = True,
    at_step: bool = False,
) -> Audit:
    """What is wrong with objects that are ready to be trained, whoever has prepared them; see ``pk.audit``.

    ``at_step``: the optimizers are about to step, so that their gradients are looked at too.

    >>> import torch
    >>> model = torch.nn.Linear(4, 4)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model.weight = torch.nn.Parameter(torch.ones(4, 4))
    >>> print(audit(model, optimizer).findings[0])
    error audit.orphans at optimizer: `AdamW` steps 1 tensor that the model does not have (shapes [4, 4]), and ...
      fix: Make the optimizer after the model is wrapped, sharded, copied or changed: AdamW(model.parameters()).
    """
    begun = time.perf_counter()
    facts = look(model, optimizer, scheduler, loaders, env=env, ask_ranks=ask_ranks, at_step=at_step)
    findings = findings_of(facts)
    again = RunningLook(
        model=model, optimizers=optimizers_of(optimizer), scheduler=scheduler, facts=facts, asks_ranks=bool(facts.ranks)
    )
    return Audit(facts=facts, findings=findings, seconds=time.perf_counter() - begun, look_again=again.look)


def look(
    model: nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    loaders: Sequence[Any] = (),
    *,
    env: Env | None = None,
    ask_ranks: bool = True,
    at_step: bool = False,
) -> PreparedFacts:
    """Facts of prepared objects. Reads each value once, for NaN and for what ranks should hold alike; draws nothing.

    Raises ``TypeError`` for objects of the wrong kind and ``ValueError`` for a model that contains itself.
    """
    optimizers = optimizers_of(optimizer)
    _expect(model, scheduler, loaders)
    around, model, loaders = fabric.autocast_of(model), fabric.module_of(model), [*map(fabric.loader_of, loaders)]
    with torch.no_grad():
        facts, places = _alone(model, optimizers, loaders)
        first = first_names(parameters_at(places))
        here = evolve(observe_env(), world_size=facts.world_size) if env is None else env
        how = preparation(model, places, facts.model, first, optimizers, here, around)
        facts = evolve(facts, preparation=how)
        if scheduler is not None:
            facts = evolve(facts, scheduler=prepared_scheduler(scheduler, optimizers))
        facts = compared(facts, places, optimizers) if ask_ranks else facts
        facts = gradients_at_step(facts, places, optimizers) if at_step else facts
    return facts if env is None else evolve(facts, world_size=env.world_size)


def _alone(model: nn.Module, optimizers: list[Any], loaders: Sequence[Any]) -> tuple[PreparedFacts, list[Any]]:
    """What one rank sees by itself."""
    places = sites(model)
    named = parameters_at(places)
    first = first_names(named)
    once = {name: param for name, param in named if first[id(param)] == name}
    dropout = modules.dropping(places)
    tensors = {**once, **{name: tensor for name, tensor in model.named_buffers() if tensor is not None}}
    running = dist.is_available() and dist.is_initialized()
    facts = PreparedFacts(
        model=model_facts(places, named, first),
        params=averaging.prepared_params(model, once),
        wrapped=modules.wrapped(places),
        ddp=averaging.ddp_facts(model, first),
        units=modules.units(places),
        optimizers=tuple(prepared_optimizer(one, model, first) for one in optimizers),
        loaders=tuple(map(prepared_loader, loaders)),
        engine=engine_facts(model),
        training=places[0].module.training,
        evaluating=modules.evaluating(places, dropout) if places[0].module.training else (),
        dropout=dropout,
        normalised=modules.normalised(places),
        nan=modules.with_nan(tensors),
        infinite=modules.infinite(once),
        negative=modules.negative(places),
        zeros=modules.zeros(once),
        drops_all=modules.dropping_all(places),
        unaveraged=averaging.unaveraged(places),
        elsewhere=modules.elsewhere(places),
        compile_off=_compile_off(),
        accumulation=accumulation(model, *optimizers, *loaders),
        world_size=dist.get_world_size() if running else 1,
        rank=dist.get_rank() if running else 0,
        backend=str(dist.get_backend_config()) if running else "",
    )
    return facts, places


def optimizers_of(given: Any) -> list[Any]:
    """The optimizers that were given, those of a joint one each. Raises ``TypeError`` for what is none."""
    listed = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    for index, one in enumerate(listed):
        if not (hasattr(inner(one), "param_groups") and hasattr(one, "step")):
            where = f"optimizer[{index}]" if isinstance(given, list | tuple) else "optimizer"
            raise TypeError(f"{where} is {said(one)}; pass an optimizer of torch, accelerate or DeepSpeed")
    return [member for one in listed for member in (members(one) if isinstance(one, torch.optim.Optimizer) else (one,))]


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
