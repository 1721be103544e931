"""Optimizer and scheduler as a script for accelerate steps them: a step ends the micro-batch of ``Prepared``."""

from __future__ import annotations

from typing import Any

from attrs import define

from prepkit.compat.accelerate.loop import AcceleratedLoop
from prepkit.compat.accelerate.not_offered import NotOffered
from prepkit.objects.joint_optimizer import ticks_left


@define(slots=False)
class SteppedOptimizer:
    """The optimizer of a plan. Everything but ``step`` and ``zero_grad`` is its own."""

    _loop: AcceleratedLoop

    @property
    def optimizer(self) -> Any:
        """Torch's optimizer, as the plan has bound it."""
        return self._loop.ready.optimizer

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last window ended without a step, because a gradient overflowed."""
        return self._loop.ready.skipped

    def step(self, closure: Any = None) -> None:
        """Ends the micro-batch: clips and steps where the window ends, and counts where it does not."""
        if closure is not None:
            raise NotOffered("optimizer.step(closure)", "write ready.step(closure)")
        self._loop.step()

    def zero_grad(self, set_to_none: bool = True) -> None:  # as torch has it
        """Clears the gradients behind a step, to None; inside a window they are kept."""
        del set_to_none
        self._loop.zero_grad()

    def train(self) -> None:
        """Nothing, as for every optimizer but those that average themselves."""

    eval = train

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


@define(slots=False)
class SteppedScheduler:
    """The scheduler of a plan, stepped where the optimizer was, and not past its end (behaviour W-16).

    Everything else is its own.
    """

    _loop: AcceleratedLoop
    _ticks: int
    """Ticks per step: as many as processes, as accelerate has it, unless batches are split."""

    @property
    def scheduler(self) -> Any:
        """Torch's scheduler."""
        return self._loop.ready.scheduler

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Ticks where the window has ended with a step."""
        if not self._loop.boundary or self._loop.ready.skipped:
            return
        for _ in range(self._ticks):
            if ticks_left(self.scheduler) != 0:
                self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)
