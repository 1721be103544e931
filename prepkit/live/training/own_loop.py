"""A loop of the user's own: ``loss.backward(); optimizer.step()``, and never ``ready.backward``.

It may: a trainer that has its own loop does. What the plan gives to ``ready.backward`` and ``ready.step`` is left to it
then, and nothing else says so.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from attrs import define, field
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from prepkit.config import NoClip
from prepkit.live.training.loop_order import LoopOutOfOrder
from prepkit.plan import Plan

_INSTEAD = "write ready.backward(loss) and ready.step() in the place of loss.backward() and optimizer.step()"


@define(kw_only=True)
class OwnLoop:
    """Steps that the optimizer took before ``ready.backward`` was ever called."""

    plan: Plan
    scaler: torch.amp.GradScaler | None
    _stepped: bool = field(default=False, init=False)
    _told: set[str] = field(factory=set, init=False)
    """What has been warned of: each once."""

    def before_step(self, model: Module, optimizer: Optimizer) -> None:
        """Raises ``LoopOutOfOrder`` for gradients that no backward has averaged; warns, once, of what the plan asks.

        Says nothing where every learning rate is 0: so torch makes an optimizer's state (``torch.distributed.
        checkpoint.state_dict._init_optim_state``).
        """
        if all(group.get("lr") == 0 for group in optimizer.param_groups):
            return
        steps = self.plan.owners.accumulation_steps
        if averages_nothing(model, optimizer):
            raise LoopOutOfOrder(
                f"optimizer.step() was called without ready.backward(loss), and no gradient of this rank has been "
                f"averaged with those of the others: the plan has {steps} micro-batches to a window, and only "
                f"ready.step() says which of them ends it; {_INSTEAD}. For a loop of your own write "
                "Config(accumulation=1)"
            )
        self._stepped = True
        if (left := self._left_out()) and "step" not in self._told:
            self._told.add("step")
            what, changes = "; ".join(left), " and ".join(left.values())
            warnings.warn(
                "optimizer.step() was called and ready.backward(loss) never, so that what the plan gives to "
                f"ready.backward() and ready.step() is not done: {what}. "
                f"{_INSTEAD[0].upper()}{_INSTEAD[1:]}; for a loop of your own, which does that itself, {changes}",
                stacklevel=5,
            )

    def before_count(self, call: str, *, used: bool, stacklevel: int) -> None:
        """Warns, once, where ``call`` takes ``ready.steps`` for steps that were not counted there."""
        if self._stepped and not used and "count" not in self._told:
            self._told.add("count")
            warnings.warn(
                f"{call} takes the number of steps from ready.steps, which counts those of ready.step() alone, and "
                f"only optimizer.step() was called; {_INSTEAD}",
                stacklevel=stacklevel,
            )

    def _left_out(self) -> dict[str, str]:
        """What is not done, to what a loop that does it writes so that it is not asked for."""
        owners = self.plan.owners
        left = {}
        if owners.accumulation_steps > 1:
            change = (
                "write Config(accumulation=1)" if self.plan.config.global_batch is None else "leave out global_batch"
            )
            left[f"one step for {owners.accumulation_steps} micro-batches"] = change
        if not isinstance(owners.clip, NoClip):
            left[f"clipping by {owners.clip}"] = "write Config(clip=pk.NoClip())"
        if self.scaler is not None and self.scaler._scale is None:  # nobody has scaled a loss
            left["the loss scale of float16"] = "call ready.scaler.scale(loss) and ready.scaler.step(optimizer)"
        return left


def averages_nothing(model: Any, optimizer: Optimizer) -> bool:
    """Whether averaging is switched off, as inside a window, at a step that takes the gradients for averages."""
    if isinstance(model, DistributedDataParallel):
        return not model.require_backward_grad_sync and torch.distributed.get_world_size(model.process_group) > 1
    if isinstance(model, FullyShardedDataParallel):
        return not model._sync_gradients
    if isinstance(model, FSDPModule):  # a backward that does not average leaves no gradient in the shards
        return all(param.grad is None for group in optimizer.param_groups for param in group["params"])
    return False
