"""Optimizer and scheduler as a script for accelerate steps them: a step ends the micro-batch of the loop."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from torch.optim import Optimizer

from prepkit.compat.accelerate.loop import AcceleratedLoop
from prepkit.objects.joint_optimizer import ticks_left


class SteppedOptimizer(Optimizer):
    """An optimizer of a script; everything but ``step``, ``zero_grad`` and its mode is the optimizer's own.

    One of torch's by its class, so that schedulers can be made from it, though nothing of it is held twice. A copy, and
    what comes out of a pickle, is a plain one that steps at once.
    """

    def __init__(self, optimizer: Optimizer, loop: AcceleratedLoop | None) -> None:
        vars(self).update(optimizer=optimizer, loop=loop)

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "loop"):  # before there is one, as while it is copied
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "loop": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> SteppedOptimizer:
        return SteppedOptimizer(deepcopy(self.optimizer, memo), None)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last window ended without a step, because a gradient overflowed."""
        return self.loop is not None and self.loop.skipped

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch gives the loss
        """Ends the micro-batch: clips and steps where the window ends, and counts where it does not."""
        if self.loop is None:
            self.optimizer.step(closure)
        else:
            self.loop.step_of(self.optimizer, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:  # as torch has it
        """Clears the gradients where the window ends; inside a window they are kept."""
        if self.loop is None:
            self.optimizer.zero_grad(set_to_none=set_to_none)
        else:
            self.loop.zero_grad(self.optimizer, set_to_none)

    def train(self) -> None:
        """Puts an optimizer with a mode, such as a schedule-free one, into that of training."""
        self._switch("train")

    def eval(self) -> None:
        """Likewise into that of evaluation."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        for one in (self.optimizer, getattr(self.optimizer, "optimizer", None)):  # DeepSpeed's has another inside
            if callable(switch := getattr(one, mode, None)):
                switch()
                return


def _own(name: str) -> Any:
    def given(self: SteppedOptimizer, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.optimizer, name)(*args, **kwargs)

    given.__name__ = name
    return given


def _field(name: str) -> property:
    return property(
        lambda self: getattr(self.optimizer, name), lambda self, value: setattr(self.optimizer, name, value)
    )


for _name in ("state", "param_groups", "defaults"):
    setattr(SteppedOptimizer, _name, _field(_name))
for _name in (
    *("state_dict", "load_state_dict", "add_param_group", "register_step_pre_hook", "register_step_post_hook"),
    *("register_state_dict_pre_hook", "register_state_dict_post_hook"),
    *("register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"),
):
    setattr(SteppedOptimizer, _name, _own(_name))


class SteppedScheduler:
    """A scheduler of a script, stepped where the optimizer was; everything else is its own (behaviour W-16)."""

    def __init__(self, scheduler: Any, loop: AcceleratedLoop, optimizers: Sequence[Any], ticks: int | None) -> None:
        """``ticks`` per step: as many as processes, as accelerate has it; None: whenever the script says so."""
        vars(self).update(scheduler=scheduler, loop=loop, optimizers=tuple(optimizers), ticks=ticks)

    def __getattr__(self, name: str) -> Any:
        if name in ("scheduler", "loop"):  # before there is one, as while it is copied
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Ticks where the window has ended with a step, and never past its end."""
        if self.ticks is None:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.loop.boundary or any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        for _ in range(self.ticks):
            if ticks_left(self.scheduler) != 0:
                self.scheduler.step(*args, **kwargs)
