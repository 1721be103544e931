"""A live optimizer and scheduler as facts. Slots are told by identity, so that tied and shared parameters are right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from prepkit.facts import GroupFact, MemberFact, OptimizerFacts, Scalar, SchedulerFacts
from prepkit.objects.joint_optimizer import members, scheduler_members, unstepped

PUBLIC = frozenset({"param_groups", "state", "defaults"})
"""Attributes in which every torch optimizer keeps its parameters, and in which they can be replaced."""


def optimizer_facts(optimizer: torch.optim.Optimizer, first: Mapping[int, str]) -> OptimizerFacts:
    """Facts of an optimizer; ``first`` is ``names.first_names`` of the model."""
    held = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    stateful = {id(tensor) for tensor, state in optimizer.state.items() if state}
    several = members(optimizer)
    one = several[0] if len(several) == 1 else None
    return OptimizerFacts(
        name=" + ".join(type(each).__name__ for each in several),
        module=type(one).__module__ if one is not None else "",
        groups=tuple(_group(group, first) for group in optimizer.param_groups),
        stateful=tuple(name for key, name in first.items() if key in stateful),
        initial_state=bool(stateful) and all(unstepped(state) for state in optimizer.state.values() if state),
        keeps_own_list=any(
            _holds(value, held) for each in several for name, value in vars(each).items() if name not in PUBLIC
        ),
        unfinished=tuple(type(each).__name__ for each in several if _unfinished(each)),
        members=() if one is not None else tuple(map(_member, several)),
    )


def _unfinished(optimizer: object) -> bool:
    return isinstance(optimizer, torch.optim.Optimizer) and not hasattr(optimizer, "_optimizer_step_pre_hooks")


def _member(optimizer: torch.optim.Optimizer) -> MemberFact:
    kind = type(optimizer)
    return MemberFact(name=kind.__name__, module=kind.__module__, groups=len(optimizer.param_groups))


def scheduler_facts(scheduler: object, optimizer: torch.optim.Optimizer | None) -> SchedulerFacts:
    """Facts of a scheduler: its class, and whether it steps this optimizer; or of a function that makes one."""
    if not callable(getattr(scheduler, "step", None)):
        name = getattr(scheduler, "__qualname__", type(scheduler).__name__)
        return SchedulerFacts(name=name, drives_optimizer=False, factory=True)
    several = scheduler_members(scheduler)
    drives = all(_drives(each, optimizer) for each in several)
    horizons = {horizon(each) for each in several}
    return SchedulerFacts(
        name=" + ".join(type(each).__name__ for each in several),
        drives_optimizer=drives,
        horizon=horizons.pop() if len(horizons) == 1 else None,
        needs_metric=any(isinstance(each, torch.optim.lr_scheduler.ReduceLROnPlateau) for each in several),
    )


HORIZONS = {
    "OneCycleLR": "total_steps",
    "CosineAnnealingLR": "T_max",
    "PolynomialLR": "total_iters",
    "WarmupDecayLR": "total_num_steps",
    "WarmupCosineLR": "total_num_steps",
}
"""Schedulers of torch and DeepSpeed that go to an end, and the attribute that says after how many ticks."""


def horizon(scheduler: object) -> int | None:
    """After how many ticks it is at its end; None where it has none that can be read.

    transformers' schedules are ``LambdaLR`` over a partial function with ``num_training_steps`` among its keywords.
    """
    ticks: object = getattr(scheduler, HORIZONS.get(type(scheduler).__name__, ""), None)
    if isinstance(scheduler, torch.optim.lr_scheduler.LinearLR) and scheduler.end_factor == 0:
        ticks = scheduler.total_iters  # one that rises, or falls to a rate that goes on, has no end
    if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
        said = {getattr(each, "keywords", {}).get("num_training_steps") for each in scheduler.lr_lambdas}
        ticks = said.pop() if len(said) == 1 else None
    if isinstance(scheduler, torch.optim.lr_scheduler.SequentialLR):
        last = horizon(scheduler._schedulers[-1])
        ticks = None if last is None else scheduler._milestones[-1] + last
    return int(ticks) if isinstance(ticks, int | float) and ticks == int(ticks) else None


def _drives(scheduler: object, optimizer: torch.optim.Optimizer | None) -> bool:
    driven = getattr(scheduler, "optimizer", None)
    return driven is not None and any(driven is each for each in (optimizer, *members(optimizer)))


def _group(group: Mapping[str, Any], first: Mapping[int, str]) -> GroupFact:
    scalars = ((name, _scalar(value)) for name, value in sorted(group.items()) if name != "params")
    return GroupFact(
        slots=tuple(first.get(id(tensor)) for tensor in group["params"]),
        options=tuple((name, value) for name, value in scalars if not isinstance(value, _NoScalar)),
    )


class _NoScalar:
    """Stands for an option that is no scalar; None is one."""


def _scalar(value: object) -> Scalar | _NoScalar:
    """A plain scalar: subclasses such as ``numpy.float64`` made plain, and a learning rate in a CPU tensor read out."""
    if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu":
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return _NoScalar()


def _holds(value: object, held: set[int], depth: int = 2) -> bool:
    """True if a parameter, or a tensor of a slot, stands in the value or in containers up to ``depth`` deep in it."""
    if isinstance(value, torch.Tensor):
        return isinstance(value, nn.Parameter) or id(value) in held
    if depth == 0 or not isinstance(value, list | tuple | set | frozenset | dict):
        return False
    items: Iterable[object] = (*value.keys(), *value.values()) if isinstance(value, dict) else value
    return any(_holds(item, held, depth - 1) for item in items)
