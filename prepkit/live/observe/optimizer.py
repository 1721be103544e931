"""A live optimizer and scheduler as facts. Slots are told by identity, so that tied and shared parameters are right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from prepkit.facts import GroupFact, OptimizerFacts, Scalar, SchedulerFacts

PUBLIC = frozenset({"param_groups", "state", "defaults"})
"""Attributes in which every torch optimizer keeps its parameters, and in which they can be replaced."""


def optimizer_facts(optimizer: torch.optim.Optimizer, first: Mapping[int, str]) -> OptimizerFacts:
    """Facts of an optimizer; ``first`` is ``names.first_names`` of the model."""
    held = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    stateful = {id(tensor) for tensor, state in optimizer.state.items() if state}
    return OptimizerFacts(
        name=type(optimizer).__name__,
        module=type(optimizer).__module__,
        groups=tuple(_group(group, first) for group in optimizer.param_groups),
        stateful=tuple(name for key, name in first.items() if key in stateful),
        keeps_own_list=any(_holds(value, held) for name, value in vars(optimizer).items() if name not in PUBLIC),
    )


def scheduler_facts(scheduler: object, optimizer: torch.optim.Optimizer | None) -> SchedulerFacts:
    """Facts of a scheduler: its class, and whether it steps this optimizer; or of a function that makes one."""
    if not callable(getattr(scheduler, "step", None)):
        name = getattr(scheduler, "__qualname__", type(scheduler).__name__)
        return SchedulerFacts(name=name, drives_optimizer=False, factory=True)
    drives = optimizer is not None and getattr(scheduler, "optimizer", None) is optimizer
    return SchedulerFacts(name=type(scheduler).__name__, drives_optimizer=drives)


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
    """Whether a parameter, or a tensor of a slot, stands in the value or in containers up to ``depth`` deep in it."""
    if isinstance(value, torch.Tensor):
        return isinstance(value, nn.Parameter) or id(value) in held
    if depth == 0 or not isinstance(value, list | tuple | set | frozenset | dict):
        return False
    items: Iterable[object] = (*value.keys(), *value.values()) if isinstance(value, dict) else value
    return any(_holds(item, held, depth - 1) for item in items)
