"""The optimizer takes the flat parameters that FSDP1 has put into the place of the model's own."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from attrs import frozen
from torch._subclasses import FakeTensor
from torch.nn import Parameter

from prepkit.live.handlers import problem_texts
from prepkit.live.handlers.optimizer import shape_problems
from prepkit.live.handlers.optimizer_state import ParamState, lay_out
from prepkit.live.interpreter import Handler
from prepkit.live.model import fsdp1_flat
from prepkit.live.model.target import Target
from prepkit.steps import RegroupOptimizer


@frozen(repr=False)
class Grouped:
    """What the optimizer held before."""

    params: tuple[list[Any], ...]
    """Per group."""
    released: dict[str, ParamState]


def regroup_ready(step: RegroupOptimizer, target: Target) -> tuple[str, ...]:
    """Every name must be a parameter; which unit it falls into is known once the units are wrapped."""
    problems = shape_problems(step.slots, target)
    holders = fsdp1_flat.holders(target.model)
    return problems + problem_texts.absent("parameter", (n for group in step.slots for n in group if n), holders)


def regroup_do(step: RegroupOptimizer, target: Target) -> Grouped:
    """Each group gets the holder of each of its names once, in order; what is not the model's stays where it is.

    Raises ``ValueError``, with nothing changed, when one holder falls into two groups or states do not join.
    """
    optimizer = target.optimizer
    assert optimizer is not None, "its check was asked"
    holders, pieces = fsdp1_flat.holders(target.model), fsdp1_flat.flat_shards(target.model)
    before = Grouped(tuple(list(group["params"]) for group in optimizer.param_groups), dict(target.released))
    groups: list[list[torch.Tensor]] = []
    group_of: dict[int, int] = {}
    for index, (slots, group) in enumerate(zip(step.slots, optimizer.param_groups, strict=True)):
        members: dict[int, torch.Tensor] = {}
        for name, tensor in zip(slots, group["params"], strict=True):
            param = holders[name] if name else tensor
            if group_of.setdefault(id(param), index) != index:
                raise ValueError(f"the flat parameter with {name} falls into two groups; put its unit into one group")
            members[id(param)] = param
        groups.append(list(members.values()))
    on_device = {key: _on_device(optimizer.param_groups[index]) for key, index in group_of.items()}
    states = _joined(target.released, holders, pieces, on_device)
    try:
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = params
        optimizer.state.update(states)
        target.released.clear()
        return before
    except BaseException:
        regroup_undo(step, target, before)
        raise


def _on_device(group: dict[str, Any]) -> bool:
    """Whether the optimizer wants its counters where the parameters are."""
    return bool(group.get("capturable") or group.get("fused"))


def _joined(
    released: dict[str, ParamState],
    holders: dict[str, Parameter],
    pieces: dict[str, fsdp1_flat.FlatShard],
    on_device: dict[int, bool],
) -> dict[torch.Tensor, ParamState]:
    """Flat parameter to the joined state of what it holds; a parameter that is still there keeps its own."""
    inside: dict[int, list[str]] = defaultdict(list)
    for name, piece in pieces.items():
        inside[id(piece.flat)].append(name)
    joined: dict[torch.Tensor, ParamState] = {}
    for name, state in released.items():
        param = holders[name]
        members = inside.get(id(param), [])
        if not members:
            joined[param] = lay_out(state, param, scalars_on_device=on_device[id(param)])
        elif param not in joined:
            if missing := [other for other in members if other not in released]:
                text = "without the state that others of its unit have; create the optimizer after preparing"
                raise ValueError(f"{problem_texts.listed(missing)}: {text}")
            joined[param] = _join({n: released[n] for n in members}, pieces, param, on_device[id(param)])
    return joined


def _join(
    states: dict[str, ParamState], pieces: dict[str, fsdp1_flat.FlatShard], param: Parameter, on_device: bool
) -> ParamState:
    first, *others = states
    listed = problem_texts.listed(list(states))
    if any(states[name].keys() != states[first].keys() for name in others):
        raise ValueError(f"{listed}: have states of different kinds; create the optimizer after preparing")
    joined: ParamState = {}
    for key, first_value in states[first].items():
        values = {name: state[key] for name, state in states.items()}
        if isinstance(first_value, torch.Tensor) and first_value.shape == pieces[first].shape:
            joined[key] = _concatenated(values, pieces, param)
        elif all(_equal(value, first_value) for value in values.values()):
            joined[key] = (
                first_value.to(param.device) if isinstance(first_value, torch.Tensor) and on_device else first_value
            )
        else:
            raise ValueError(
                f"{listed}: {key!r} differs, and a flat parameter has one; create the optimizer afterwards"
            )
    return joined


def _concatenated(
    values: dict[str, torch.Tensor], pieces: dict[str, fsdp1_flat.FlatShard], param: Parameter
) -> torch.Tensor:
    """The states end to end, as much of them as this rank holds, 0 in the padding."""
    dtype = next(iter(values.values())).dtype
    flat = torch.zeros(param.shape, dtype=dtype, device=param.device)
    for name, value in values.items():
        piece = pieces[name]
        if piece.first < piece.last:
            begin = piece.start + piece.first - (piece.shard * _index(piece) if piece.cut else 0)
            flat[begin : begin + piece.last - piece.first] = piece.part(value).to(param.device)
    return flat


def _index(piece: fsdp1_flat.FlatShard) -> int:
    """Which shard of its flat parameter this rank holds."""
    return (piece.start + piece.first) // piece.shard


def _equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return isinstance(a, FakeTensor) or bool(torch.equal(a.cpu(), b.cpu()))  # a rehearsal has no values
    return a == b


def regroup_undo(step: RegroupOptimizer, target: Target, memo: Grouped) -> None:
    """Puts back what each group held; the state is that from before, whole."""
    del step
    optimizer = target.optimizer
    assert optimizer is not None, "it was there when its groups were changed"
    for group, params in zip(optimizer.param_groups, memo.params, strict=True):
        for param in group["params"]:
            optimizer.state.pop(param, None)
        group["params"] = params
    target.released.update(memo.released)


REGROUP: Handler[RegroupOptimizer, Target, Grouped] = Handler(ready=regroup_ready, do=regroup_do, undo=regroup_undo)
