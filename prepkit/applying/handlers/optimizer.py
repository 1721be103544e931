"""The optimizer lets go of its parameters, takes what the model has become, or is created over it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attrs import frozen
from torch.nn import Parameter
from torch.optim import Optimizer

from prepkit.applying.handlers import problems
from prepkit.applying.handlers.optimizer_state import ParamState, lay_out, unmovable
from prepkit.court import refused
from prepkit.findings import RunRefused
from prepkit.interpreter import Handler
from prepkit.objects import fsdp1_flat, names
from prepkit.objects.joint_optimizer import joined, members
from prepkit.objects.target import Target
from prepkit.steps import CreateOptimizer, OptimizerOption, RebindOptimizer, ReleaseOptimizer

Slots = tuple[tuple[str, ...], ...]

# --- release -------------------------------------------------------------------------------------------------------


def release_ready(step: ReleaseOptimizer, target: Target) -> problems.Problems:
    """Every slot must hold the parameter that the step names, and state must be of a kind that shards can take."""
    met = shape_problems(step.slots, target)
    if met or target.optimizer is None:
        return met
    params = names.named_parameters(target.model)
    own = {id(param) for param in params.values()}
    wrong = [
        name or "a tensor that is not the model's"
        for _, _, name, tensor in _slots(step.slots, target.optimizer)
        if (params.get(name) is not tensor if name else id(tensor) in own)
    ]
    if wrong:
        moved = problems.told("plan.model-changed", wrong, "the optimizer no longer holds it where the plan says")
        return problems.absent("parameter", _named(step.slots), params) + moved
    return tuple(
        finding
        for _, _, name, tensor in _slots(step.slots, target.optimizer)
        if name
        for finding in unmovable(name, target.optimizer.state.get(tensor, {}), tensor.shape)
    )


def release_do(step: ReleaseOptimizer, target: Target) -> None:
    """Puts an empty parameter into each named slot, a new one each: equal ones would be one key of the state (G-57)."""
    optimizer = _optimizer(target)
    try:
        for group, place, name, tensor in _slots(step.slots, optimizer):
            if name:
                if tensor in optimizer.state:
                    target.released[name] = optimizer.state[tensor]
                    del optimizer.state[tensor]
                optimizer.param_groups[group]["params"][place] = Parameter(
                    torch.empty(0, device="cpu"), requires_grad=False
                )
    except BaseException:
        release_undo(step, target, None)
        raise


def release_undo(step: ReleaseOptimizer, target: Target, memo: None) -> None:
    """Puts the model's parameters back by name, each with its state."""
    del memo
    optimizer, params = _optimizer(target), names.named_parameters(target.model)
    for group, place, name, _ in _slots(step.slots, optimizer):
        if name:
            optimizer.param_groups[group]["params"][place] = params[name]
            if name in target.released:
                optimizer.state[params[name]] = target.released.pop(name)


# --- rebind --------------------------------------------------------------------------------------------------------


@frozen(eq=False, repr=False)
class Bound:
    """What one slot held before it was bound, and what it is bound to."""

    group: int
    place: int
    name: str
    tensor: torch.Tensor
    param: Parameter
    state: ParamState | None
    """The optimizer's own state; None where it had none, and where the state came from ``target.released``."""


def rebind_ready(step: RebindOptimizer, target: Target) -> problems.Problems:
    """Slots and names must be there, and no state may be moved to a parameter without data, where it would be lost."""
    met = shape_problems(step.slots, target)
    if met or target.optimizer is None:
        return met
    params, state = names.named_parameters(target.model), target.optimizer.state
    lost = (
        name
        for name in _named(step.slots)
        if name in params and params[name].is_meta and _has_data(state.get(params[name], {}))
    )
    empty = problems.told("plan.no-weights", lost, "on meta, but the optimizer has state for it")
    return problems.absent("parameter", _named(step.slots), params) + empty


def rebind_do(step: RebindOptimizer, target: Target) -> tuple[Bound, ...]:
    """Binds every slot to the parameter of its name and lays its state out as the parameter lies.

    Released state is freed one parameter at a time, so the peak is one whole state and the shards of the others.
    """
    optimizer, params = _optimizer(target), names.named_parameters(target.model)
    if missing := problems.absent("parameter", _named(step.slots), params):
        raise KeyError(missing[0])
    before: list[Bound] = []
    pieces = fsdp1_flat.flat_shards(target.model)
    try:
        for group, place, name, tensor in _slots(step.slots, optimizer):
            if name:
                before.append(Bound(group, place, name, tensor, params[name], optimizer.state.get(tensor)))
                _bind(optimizer, target, before[-1], pieces.get(name))
        return tuple(before)
    except BaseException:
        rebind_undo(step, target, tuple(before))
        raise


def _bind(optimizer: Optimizer, target: Target, slot: Bound, piece: fsdp1_flat.FlatShard | None) -> None:
    """In an order in which the state is always in one of both places, so that the way back finds it.

    The slot comes before its state: of several optimizers the one that steps a parameter takes its state.
    """
    options = optimizer.param_groups[slot.group]
    on_device = bool(options.get("capturable") or options.get("fused"))
    state = target.released.get(slot.name, slot.state)
    options["params"][slot.place] = slot.param
    if state is not None:
        optimizer.state[slot.param] = lay_out(state, slot.param, scalars_on_device=on_device, piece=piece)
        target.released.pop(slot.name, None)
        if slot.tensor is not slot.param:
            optimizer.state.pop(slot.tensor, None)
        if not optimizer.state[slot.param]:
            del optimizer.state[slot.param]


def rebind_undo(step: RebindOptimizer, target: Target, memo: tuple[Bound, ...]) -> None:
    """Puts back what each slot held. Released state goes back to ``target.released`` as it lies now: in shards."""
    del step
    optimizer = _optimizer(target)
    for slot in memo:
        state = optimizer.state.pop(slot.param, None)
        optimizer.param_groups[slot.group]["params"][slot.place] = slot.tensor
        if slot.state is not None:
            optimizer.state[slot.tensor] = slot.state
        elif state is not None:
            target.released[slot.name] = state


# --- create --------------------------------------------------------------------------------------------------------


def optimizer_class(name: str) -> type[Optimizer] | None:
    """The class of ``torch.optim`` with this name; None where it has none, in this release or at all."""
    found = getattr(torch.optim, name, None)
    return found if isinstance(found, type) and issubclass(found, Optimizer) else None


def create_ready(step: CreateOptimizer, target: Target) -> problems.Problems:
    """No optimizer may be there, torch must know its class, and every name must be a parameter."""
    kind = type(target.optimizer).__name__
    two = ["optimizer"] if target.optimizer is not None else []
    lacking = [f"torch.optim.{step.algorithm}"] if optimizer_class(step.algorithm) is None else []
    return (
        *problems.absent("parameter", _created_names(step), names.named_parameters(target.model)),
        *problems.told("optimizer.two", two, f"the plan creates {step.algorithm}, and an optimizer ({kind}) was given"),
        *problems.told("optimizer.newer-torch", lacking, f"torch {torch.__version__} does not have it"),
    )


def create_do(step: CreateOptimizer, target: Target) -> None:
    """A group with the named parameters, in their order, and those with options of their own.

    What stands for several parameters (FSDP1) is held once. Raises ``RunRefused`` where it falls into two groups.
    """
    holders = fsdp1_flat.holders(target.model)
    make: Any = optimizer_class(step.algorithm)
    groups = [(step.names, _keywords(())), *((group.names, _keywords(group.options)) for group in step.groups)]
    held = [dict.fromkeys(holders[name] for name in of) for of, _ in groups]
    if sum(map(len, held)) != len({id(param) for params in held for param in params}):
        raise refused("fsdp1.unit-in-two-groups", "optimizer", "a flat parameter falls into two of its groups")
    filled = [{"params": list(params), **own} for params, (_, own) in zip(held, groups, strict=True) if params]
    target.optimizer = joined((*members(target.optimizer), make(filled, **_keywords(step.options))))


def create_undo(step: CreateOptimizer, target: Target, memo: None) -> None:
    """Forgets it."""
    del memo
    target.optimizer = joined(members(target.optimizer)[: step.index])


def _created_names(step: CreateOptimizer) -> tuple[str, ...]:
    return (*step.names, *(name for group in step.groups for name in group.names))


def _keywords(options: tuple[OptimizerOption, ...]) -> dict[str, Any]:
    return {option.name: option.value for option in options}


# --- shared --------------------------------------------------------------------------------------------------------


def _slots(slots: Slots, optimizer: Optimizer) -> Iterator[tuple[int, int, str, torch.Tensor]]:
    """Group, place, planned name and present tensor of every slot."""
    for group, planned in enumerate(slots):
        for place, name in enumerate(planned):
            yield group, place, name, optimizer.param_groups[group]["params"][place]


def _named(slots: Slots) -> tuple[str, ...]:
    return tuple(name for group in slots for name in group if name)


def _optimizer(target: Target) -> Optimizer:
    if target.optimizer is None:
        raise RunRefused(problems.no_optimizer(target))
    return target.optimizer


def shape_problems(slots: Slots, target: Target) -> problems.Problems:
    """The optimizer must be there, with groups as long as the plan's."""
    if target.optimizer is None:
        return problems.no_optimizer(target)
    planned, present = [len(group) for group in slots], [len(g["params"]) for g in target.optimizer.param_groups]
    differ = ["optimizer"] if planned != present else []
    return problems.told("plan.model-changed", differ, f"has groups of {present} parameters, the plan of {planned}")


def _has_data(state: ParamState) -> bool:
    return any(isinstance(value, torch.Tensor) and value.numel() > 1 and not value.is_meta for value in state.values())


RELEASE: Handler[ReleaseOptimizer, Target, None] = Handler(ready=release_ready, do=release_do, undo=release_undo)
REBIND: Handler[RebindOptimizer, Target, tuple[Bound, ...]] = Handler(
    ready=rebind_ready, do=rebind_do, undo=rebind_undo
)
CREATE: Handler[CreateOptimizer, Target, None] = Handler(ready=create_ready, do=create_do, undo=create_undo)
