"""Model and optimizer of torch's own engines, as ``torch.distributed.checkpoint.state_dict`` names them.

torch fills an optimizer that has no state by a step over zero gradients before it reads or writes its state dict
(``_init_optim_state``): afterwards AdamW counts one step more than were taken, and gradients that were there stop it,
so that nothing is read at all. So it is read with an optimizer that looks filled, and written into one that is empty.

LBFGS is "closed": its state is one thing, not tensors by parameter, and a step of it takes a closure, so that torch
makes no room for it. It trains where every rank holds all parameters and the same state, which is saved whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from attrs import evolve
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # the names that torch itself looks up
from torch.distributed.checkpoint.state_dict import (
    _init_optim_state,  # what torch itself does to make room
    get_state_dict,
    set_state_dict,
)
from torch.nn import Module, Parameter
from torch.optim import LBFGS, Optimizer, SparseAdam

from prepkit.objects import names
from prepkit.objects.joint_optimizer import members
from prepkit.saving import contents
from prepkit.saving.contents import STATE, Contents

Keys = tuple[Any, ...]


def held(model: Module, optimizer: Optimizer | None) -> Contents:
    """The run as it is now; nothing of it is changed."""
    if optimizer is not None and _is_closed(optimizer):
        alone = held(model, None)
        own = _closed_plain(optimizer)
        return evolve(alone, plain={**alone.plain, **own}, groups=_closed_groups(model, optimizer))
    with _as_it_is(optimizer):
        return _split(_nested(model, optimizer))[0]


@contextmanager
def filled(
    model: Module, optimizer: Optimizer | None, stored: Mapping[str, Any], groups: list[dict[str, Any]]
) -> Iterator[Contents]:
    """Yield what is to be filled, with room for all state; put it in place afterwards. ``groups`` are those stored.

    A parameter of which the checkpoint holds no state, because it never had a gradient, has none afterwards. If what is
    inside raises, the optimizer is as it was, and tensors of the model that were filled by then stay so.
    """
    if optimizer is not None and _is_closed(optimizer):
        name = _closed_key(optimizer)
        with filled(model, None, stored, []) as wanted:
            wanted.plain.update({name: None} if name in stored else {})
            yield wanted
            state = wanted.plain.pop(name, None)
        _put_closed(optimizer, state, groups)
        return
    with _emptied(optimizer):
        nested = _nested(model, optimizer)
        empty = contents.stateless(_owners(nested), stored)
        wanted, paths = _split(_without(nested, empty))
        yield wanted
        for name, value in wanted.plain.items():
            _put(nested, paths[name], value)
        for group, before in zip(nested.get("optimizer", {}).get("param_groups", ()), groups, strict=False):
            known = {key: value for key, value in before.items() if key in group or key == "initial_lr"}
            group.update({key: value for key, value in known.items() if key != "params"})
        if nested["model"]:
            set_state_dict(
                model,
                optimizer if optimizer is not None else (),
                model_state_dict=nested["model"],
                optim_state_dict=nested.get("optimizer", {}),
            )
        _forget(model, optimizer, empty)


def _nested(model: Module, optimizer: Optimizer | None) -> dict[str, Any]:
    bare = optimizer is None and next(model.parameters(), None) is None
    if bare and not model.state_dict():  # of which torch asks the process group
        return {"model": {}}
    params, stepped = get_state_dict(model, optimizer if optimizer is not None else ())
    return {"model": params, **({"optimizer": stepped} if optimizer is not None else {})}


def _split(nested: Mapping[str, Any]) -> tuple[Contents, dict[str, Keys]]:
    """Tensors and all else apart, and the path of each in the nested state."""
    state = {key: {k: v for k, v in one.items() if k != "param_groups"} for key, one in nested.items()}
    flat, paths = flatten_state_dict(state)
    tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
    plain = {name: value for name, value in flat.items() if name not in tensors and value not in ({}, [], ())}
    groups = [dict(group) for group in nested.get("optimizer", {}).get("param_groups", ())]
    return Contents(tensors=tensors, plain=plain, groups=groups), dict(paths)


def _owners(nested: Mapping[str, Any]) -> dict[str, str]:
    """Name of every piece of optimizer state to its parameter."""
    state = {"optimizer": {"state": nested.get("optimizer", {}).get("state", {})}}
    return {name: str(path[2]) for name, path in flatten_state_dict(state)[1].items() if len(path) > 2}


def _without(nested: Mapping[str, Any], params: Collection[str]) -> dict[str, Any]:
    """The same state, and the same tensors, without the optimizer's of these parameters."""
    if not params:
        return dict(nested)
    optimizer = nested["optimizer"]
    kept = {name: value for name, value in optimizer["state"].items() if name not in params}
    return {**nested, "optimizer": {**optimizer, "state": kept}}


def _put(nested: dict[str, Any], path: Keys, value: Any) -> None:
    at: Any = nested
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value


def _forget(model: Module, optimizer: Optimizer | None, stateless: Collection[str]) -> None:
    """Take out the state that torch has made room for, of parameters that had none when they were saved."""
    params = names.named_parameters(model) if stateless else {}
    for name in stateless:
        if optimizer is not None and (param := params.get(name)) is not None:
            optimizer.state.pop(param, None)


def _is_closed(optimizer: Optimizer | None) -> bool:
    """True where the optimizer's state is saved whole."""
    return isinstance(optimizer, LBFGS)


def _closed_key(optimizer: Optimizer) -> str:
    """The name of its state in a checkpoint."""
    return f"{STATE}{type(optimizer).__name__}"


def _closed_plain(optimizer: Optimizer) -> dict[str, Any]:
    """Its state under its name; nothing before the first step."""
    state = optimizer.state_dict()["state"]
    return {_closed_key(optimizer): state} if state else {}


def _closed_groups(model: Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Per group its options, and the names of its parameters."""
    named = {id(param): name for name, param in reversed(names.named_parameters(model).items())}
    return [
        {**group, "params": [named.get(id(param), "") for param in group["params"]]} for group in optimizer.param_groups
    ]


def _put_closed(optimizer: Optimizer, state: Any, stored: list[dict[str, Any]]) -> None:
    """Put back state, None for none, and the options of the groups."""
    own = optimizer.state_dict()["param_groups"]
    options = ({name: value for name, value in group.items() if name != "params"} for group in stored)
    param_groups = [{**group, **before} for group, before in zip(own, options, strict=True)]
    optimizer.load_state_dict({"state": state or {}, "param_groups": param_groups})


@contextmanager
def _as_it_is(optimizer: Optimizer | None) -> Iterator[None]:
    """Keep an empty optimizer empty inside: one gradient of zeros tells torch that there is nothing to fill."""
    params = () if optimizer is None or optimizer.state else tuple(_trained(optimizer))
    if not params or any(param.grad is not None for param in params):
        yield
        return
    smallest = min(params, key=torch.Tensor.numel)
    smallest.grad = torch.zeros_like(smallest)
    try:
        yield
    finally:
        smallest.grad = None


@contextmanager
def _emptied(optimizer: Optimizer | None) -> Iterator[None]:
    """Take state and gradients out of the optimizer inside, so that torch makes room for all that can be read.

    If what is inside raises, the state is what it was before. Gradients are put back in any case.
    """
    if optimizer is None:
        yield
        return
    before, grads = dict(optimizer.state), [(param, param.grad) for param in _trained(optimizer)]
    optimizer.state.clear()
    for param, _ in grads:
        param.grad = None
    try:
        _make_room(optimizer)
        yield
    except BaseException:
        optimizer.state.clear()
        optimizer.state.update(before)
        raise
    finally:
        for param, grad in grads:
            param.grad = grad


def _make_room(optimizer: Optimizer) -> None:
    """Fill what torch cannot: it steps over dense zeros, which ``SparseAdam`` does not take.

    torch leaves an optimizer that has state as it is, so that beside one of those all others are filled here too.
    """
    if not any(isinstance(member, SparseAdam) for member in members(optimizer)):
        return
    for member in members(optimizer):
        if not isinstance(member, SparseAdam):
            _init_optim_state(member)
            continue
        for param in _trained(member):
            moments = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
            member.state[param] = {"step": 0, **moments}


def _trained(optimizer: Optimizer) -> Iterator[Parameter]:
    for group in optimizer.param_groups:
        yield from (param for param in group["params"] if param.requires_grad)
