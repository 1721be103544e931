"""After apply: what the steps that act on the optimizer have left behind."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve
from torch import Tensor

from prepkit.applying.checks import fsdp
from prepkit.facts.run import Departure, each, same
from prepkit.objects import fsdp1_flat
from prepkit.objects.joint_optimizer import members
from prepkit.objects.state import LiveModel, actual_layout
from prepkit.steps import CreateOptimizer, RebindOptimizer, RegroupOptimizer


def regrouped(step: RegroupOptimizer, live: LiveModel) -> Iterator[Departure]:
    """Every name is once in its group, whatever holds it now."""
    yield from each("RegroupOptimizer", "no state is left behind", sorted(live.target.released))
    yield from each("RegroupOptimizer", "groups hold what they held", fsdp.wrong_groups(step, live))


def rebound(step: RebindOptimizer, live: LiveModel) -> Iterator[Departure]:
    """State that was released has been laid out as its parameter lies."""
    del step
    yield from each("RebindOptimizer", "no state is left behind", sorted(live.target.released))
    optimizer = live.target.optimizer
    names = {id(param): name for name, param in reversed(live.params.items())}  # a tied one under its first name
    bad = [
        f"{key} of {names[id(param)]} has {difference}"
        for param, state in (optimizer.state if optimizer else {}).items()
        if id(param) in names
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == param.shape
        for difference in _apart(param, value)
    ]
    yield from each("RebindOptimizer", "state lies as its parameter does", bad)


def _apart(param: Tensor, value: Tensor) -> tuple[str, ...]:
    of_param, of_state = actual_layout(param), actual_layout(value)
    # Class, dtype and requires_grad may differ.
    expected = evolve(of_state, placements=of_param.placements, local_shape=of_param.local_shape)
    return expected.against(of_state)


def created(step: CreateOptimizer, live: LiveModel) -> Iterator[Departure]:
    """Class, parameters and options are those of the step."""
    if hasattr(live.target.model, "basic_optimizer"):
        return  # DeepSpeed has taken it over; what it holds is looked at there
    standing = members(live.target.optimizer)
    optimizer = standing[step.index] if step.index < len(standing) else None
    yield from same("CreateOptimizer", "class", step.algorithm, type(optimizer).__name__)
    groups = optimizer.param_groups if optimizer else []
    slots = [id(param) for group in groups for param in group["params"]]
    holders = {**live.params, **fsdp1_flat.holders(live.target.model)}
    planned = [(step.names, step.options), *((group.names, (*step.options, *group.options)) for group in step.groups)]
    planned = [(names, options) for names, options in planned if names]
    wanted: dict[int, str] = {}
    for name in (name for names, _ in planned for name in names):
        wanted.setdefault(id(holders.get(name)), name)  # what holds several, once
    yield from same("CreateOptimizer", "number of parameters", len(wanted), len(slots))
    bad = [name for (key, name), slot in zip(wanted.items(), slots, strict=False) if key != slot]
    yield from each("CreateOptimizer", "every slot holds the model's parameter", bad)
    yield from same("CreateOptimizer", "groups", len(planned), len(groups))
    bad = [
        f"{name} planned {value}, found {group.get(name)}"
        for (_, options), group in zip(planned, groups, strict=False)
        for name, value in {option.name: option.value for option in options}.items()
        if group.get(name) != value
    ]
    yield from each("CreateOptimizer", "options", bad)
