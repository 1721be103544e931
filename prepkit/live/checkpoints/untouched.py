"""Looking at an optimizer's state without changing it.

torch fills an optimizer that has no state by a step over zero gradients before it reads or writes its state dict
(``torch.distributed.checkpoint.state_dict._init_optim_state``): afterwards AdamW counts one step more than were taken,
and gradients that were there stop it, so that nothing is read at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.checkpoint.state_dict import _init_optim_state  # what torch itself does to make room
from torch.nn import Parameter
from torch.optim import Optimizer, SparseAdam

from prepkit.live.model.joint_optimizer import members


@contextmanager
def as_it_stands(optimizer: Optimizer | None) -> Iterator[None]:
    """An empty optimizer stays empty inside: one gradient of zeros tells torch that there is nothing to fill."""
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
def emptied(optimizer: Optimizer | None) -> Iterator[None]:
    """Inside, the optimizer has neither state nor gradients, so that torch makes room for all that can be read.

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
    """Fills what torch cannot: it steps over dense zeros, which ``SparseAdam`` does not take.

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
