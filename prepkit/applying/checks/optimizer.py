"""What has to hold of every prepared optimizer and scheduler, whatever the steps: whose parameters its slots hold."""

from __future__ import annotations

from collections.abc import Iterator

from torch.optim import Optimizer

from prepkit.objects import fsdp1_flat
from prepkit.objects import joint_optimizer as joint
from prepkit.objects.joint_optimizer import scheduler_members
from prepkit.objects.state import LiveModel
from prepkit.plan import Plan
from prepkit.plan.attestation import Check, each, same
from prepkit.steps import RegroupOptimizer


def slots(plan: Plan, live: LiveModel) -> Iterator[Check]:
    """Every slot holds the model's parameter of its name, so what was trained before still is (pain 1)."""
    seen = plan.facts.optimizer
    optimizer = live.target.optimizer
    if any(isinstance(planned.step, RegroupOptimizer) for planned in plan.steps):
        return  # its own check knows what the groups have become
    if seen is None or optimizer is None:
        if seen is not None:
            yield Check(subject="optimizer", what="exists", holds=False, detail="the plan has one, the target has none")
        return
    groups = tuple(group.slots for group in seen.groups)
    yield same("optimizer", "slots per group", [*map(len, groups)], [len(g["params"]) for g in optimizer.param_groups])
    bad = [
        f"group {index} slot {place} does not hold the model's {name}"
        for index, (slots, group) in enumerate(zip(groups, optimizer.param_groups, strict=False))
        for place, (name, param) in enumerate(zip(slots, group["params"], strict=False))
        if name and live.params.get(name) is not param
    ]
    yield each("optimizer", "every slot holds the model's parameter", bad)


def coverage(plan: Plan, live: LiveModel) -> Iterator[Check]:
    """No tensor is stepped that is not the model's, none is frozen, and what the plan trains is stepped."""
    optimizer = live.target.optimizer
    if optimizer is None:
        return
    names = {id(param): name for name, param in reversed(live.params.items())}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    foreign = sum(id(param) not in names for param in params)
    seen = plan.facts.optimizer
    allowed = sum(not name for group in seen.groups for name in group.slots) if seen is not None else 0
    yield same("optimizer", "tensors that are not the model's", allowed, foreign)
    planned = {name for group in seen.groups for name in group.slots if name} if seen is not None else None
    stepped = {names.get(id(param), "") for param in params}
    missing = [
        name
        for name, param in live.params.items()
        if param.requires_grad
        and names[id(param)] == name
        and name not in stepped
        and (planned is None or name in planned)
    ]
    yield each("optimizer", "every parameter that is trained is stepped", [f"{name} is not held" for name in missing])
    yield each("optimizer", "state that was there is kept", _lost(plan, live, optimizer))


def _lost(plan: Plan, live: LiveModel, optimizer: Optimizer) -> list[str]:
    """Names of the parameters that have lost their optimizer state; a rank without a part of one has none to lose."""
    seen = plan.facts.optimizer
    if seen is None or not seen.stateful:
        return []
    stateful = {id(param) for param, state in optimizer.state.items() if state}
    shards = fsdp1_flat.flat_shards(live.target.model)
    holders = {**live.params, **{name: shard.flat for name, shard in shards.items() if not shard.original}}
    empty = {name for name, shard in shards.items() if shard.original and shard.cut and shard.first == shard.last}
    return [
        f"{name} has lost its state"
        for name in seen.stateful
        if name not in empty and id(holders.get(name)) not in stateful
    ]


def scheduler(plan: Plan, live: LiveModel) -> Iterator[Check]:
    """The scheduler ticks for the optimizer that stands there."""
    seen = plan.facts.scheduler
    if seen is not None and seen.drives_optimizer:
        optimizer = live.target.optimizer
        groups = getattr(optimizer, "param_groups", None)  # DeepSpeed shows those of the one inside
        standing = (optimizer, *(joint.members(optimizer) if optimizer is not None else ()))
        driven = [getattr(each, "optimizer", None) for each in scheduler_members(live.target.scheduler)]
        drives = all(
            any(one is each for each in standing) or getattr(one, "param_groups", 0) is groups for one in driven
        )
        detail = "" if drives else "its optimizer is another object; what it changes is never stepped"
        yield Check(subject="scheduler", what="drives the optimizer", holds=drives, detail=detail)
