"""Model and optimizer of torch's own engines, as ``torch.distributed.checkpoint.state_dict`` names them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from attrs import evolve
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # the names that torch itself looks up
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import Module
from torch.optim import Optimizer

from prepkit.live.checkpoints import closed_state, contents, untouched
from prepkit.live.checkpoints.contents import Contents
from prepkit.live.model import names

Keys = tuple[Any, ...]


def held(model: Module, optimizer: Optimizer | None) -> Contents:
    """What stands here; nothing of it is changed."""
    if optimizer is not None and closed_state.is_closed(optimizer):
        alone = held(model, None)
        own = closed_state.plain(optimizer)
        return evolve(alone, plain={**alone.plain, **own}, groups=closed_state.groups(model, optimizer))
    with untouched.as_it_stands(optimizer):
        return _split(_nested(model, optimizer))[0]


@contextmanager
def filled(
    model: Module, optimizer: Optimizer | None, stored: Mapping[str, Any], groups: list[dict[str, Any]]
) -> Iterator[Contents]:
    """Yields what is to be filled, with room for all state; puts it in place afterwards. ``groups`` are those stored.

    A parameter of which the checkpoint holds no state, because it never had a gradient, has none afterwards. If what is
    inside raises, the optimizer is as it was, and tensors of the model that were filled by then stay so.
    """
    if optimizer is not None and closed_state.is_closed(optimizer):
        name = closed_state.key(optimizer)
        with filled(model, None, stored, []) as wanted:
            wanted.plain.update({name: None} if name in stored else {})
            yield wanted
            state = wanted.plain.pop(name, None)
        closed_state.put(optimizer, state, groups)
        return
    with untouched.emptied(optimizer):
        nested = _nested(model, optimizer)
        empty = contents.stateless(_owners(nested), stored)
        wanted, paths = _split(_without(nested, empty))
        yield wanted
        for name, value in wanted.plain.items():
            _put(nested, paths[name], value)
        for group, before in zip(nested.get("optimizer", {}).get("param_groups", ()), groups, strict=False):
            known = {key: value for key, value in before.items() if key in group or key == "initial_lr"}
            group.update({key: value for key, value in known.items() if key != "params"})
        set_state_dict(
            model,
            optimizer if optimizer is not None else (),
            model_state_dict=nested["model"],
            optim_state_dict=nested.get("optimizer", {}),
        )
        _forget(model, optimizer, empty)


def _nested(model: Module, optimizer: Optimizer | None) -> dict[str, Any]:
    params, stepped = get_state_dict(model, optimizer if optimizer is not None else ())
    return {"model": params, **({"optimizer": stepped} if optimizer is not None else {})}


def _split(nested: Mapping[str, Any]) -> tuple[Contents, dict[str, Keys]]:
    """Tensors and all else apart, and where each stands in the nested state."""
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
    """Takes out the state that torch has made room for, of parameters that had none when they were saved."""
    params = names.named_parameters(model) if stateless else {}
    for name in stateless:
        if optimizer is not None and (param := params.get(name)) is not None:
            optimizer.state.pop(param, None)
