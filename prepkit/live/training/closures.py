"""Optimizers that ask for gradients several times within one step, such as LBFGS: ``ready.step(closure)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from prepkit.live.model.joint_optimizer import members

if TYPE_CHECKING:
    from prepkit.live.training.loop_view import LoopView

Closure = Callable[[], Any]


def repeated(
    closure: Closure, optimizer: Optimizer, look: Callable[[], None], clip: Callable[[Optimizer], None]
) -> Closure:
    """What the optimizer calls: fresh gradients by ``closure``, which are looked at and clipped.

    The loss that it gets is the mean over all ranks: LBFGS decides by it whether to go on, and ranks that decide
    otherwise would wait for each other for ever.
    """

    def evaluate() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.enable_grad():
            loss = closure()
        look()
        clip(optimizer)
        return mean_over_ranks(loss.detach())

    return evaluate


def mean_over_ranks(loss: Tensor) -> Tensor:
    """The mean of one number that every rank has. Collective where there are several."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return loss
    joint = loss.clone()
    dist.all_reduce(joint)
    return joint / dist.get_world_size()


def stepped(ready: LoopView, closure: Closure | None) -> Optimizer:
    """The optimizer that ``ready.step(closure)`` steps.

    Raises ``RuntimeError`` where there is none, where a closure is wanted and none is given, or given and has no place.
    """
    optimizer = ready.optimizer
    if optimizer is None:
        raise RuntimeError(
            "there is no optimizer to step: the plan was made without one; build it with optimizer=..., "
            "or with Config(optimizer=AdamW(...)), or leave out ready.step() for inference"
        )
    if closure is None:
        wants = next((type(each).__name__ for each in members(optimizer) if isinstance(each, LBFGS)), "")
        if wants:
            raise RuntimeError(
                f"{wants} asks for gradients several times a step; write ready.step(closure), where closure computes "
                "the loss, calls ready.backward(loss) and returns the loss"
            )
        return optimizer
    if not callable(closure):
        raise TypeError(f"ready.step({closure!r:.60}): a step takes nothing, or a function that computes the loss")
    if ready.engine_steps:
        raise RuntimeError("the engine steps the optimizer by itself and takes no closure; call ready.step()")
    window = ready.plan.owners.accumulation_steps
    if ready.scaler is not None or window > 1:
        why = "a loss scale" if ready.scaler is not None else f"accumulation={window}"
        raise RuntimeError(f"a closure makes the gradients of one step anew, which does not go with {why}")
    return optimizer
