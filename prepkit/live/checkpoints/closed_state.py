"""Optimizers whose state is one thing, not tensors by parameter, such as LBFGS: saved whole, as plain data.

torch's distributed checkpoints make room for state by a step without a closure, which these do not take
(``torch.distributed.checkpoint.state_dict._init_optim_state``). They train where every rank holds all parameters, and
every rank holds the same state.
"""

from __future__ import annotations

from typing import Any

from torch.nn import Module
from torch.optim import LBFGS, Optimizer

from prepkit.live.checkpoints.contents import STATE
from prepkit.live.model import names


def is_closed(optimizer: Optimizer | None) -> bool:
    """Whether the optimizer's state is saved whole."""
    return isinstance(optimizer, LBFGS)


def key(optimizer: Optimizer) -> str:
    """The name of its state in a checkpoint."""
    return f"{STATE}{type(optimizer).__name__}"


def plain(optimizer: Optimizer) -> dict[str, Any]:
    """Its state under its name; nothing before the first step."""
    state = optimizer.state_dict()["state"]
    return {key(optimizer): state} if state else {}


def groups(model: Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Per group its options, and the names of its parameters."""
    named = {id(param): name for name, param in reversed(names.named_parameters(model).items())}
    return [
        {**group, "params": [named.get(id(param), "") for param in group["params"]]} for group in optimizer.param_groups
    ]


def put(optimizer: Optimizer, state: Any, stored: list[dict[str, Any]]) -> None:
    """Puts back state, None for none, and the options of the groups."""
    own = optimizer.state_dict()["param_groups"]
    options = ({name: value for name, value in group.items() if name != "params"} for group in stored)
    param_groups = [{**group, **before} for group, before in zip(own, options, strict=True)]
    optimizer.load_state_dict({"state": state or {}, "param_groups": param_groups})
