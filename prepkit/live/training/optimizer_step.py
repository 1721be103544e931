"""What ends a window: gradients are clipped, the optimizer steps, the scheduler ticks; or the engine does all that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from prepkit.config import Clip, ClipNorm
from prepkit.live.training import closures
from prepkit.live.training.closures import Closure
from prepkit.live.training.drivers import Driver
from prepkit.live.training.loop_order import LoopOrder
from prepkit.plan import Plan


@define(kw_only=True)
class OptimizerStep:
    """Who acts is the plan's; ``skipped`` and ``grad_norm`` are of the last window."""

    plan: Plan
    driver: Driver
    order: LoopOrder
    clip: Clip
    """The plan's; a loop that says it per window, as accelerate's does, puts another here."""
    scheduler: Any
    scaler: torch.amp.GradScaler | None
    clears: bool = True
    """Whether the gradients go when a window has ended; no in a loop that clears them, as accelerate's does."""
    skipped: bool = False
    grad_norm: torch.Tensor | None = None
    acting: bool = False
    """Whether the optimizer steps because ``ready.step`` says so, or torch makes room for state that is read."""

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Inside, the optimizer may step."""
        self.acting = True
        try:
            yield
        finally:
            self.acting = False

    def refuse_foreign(self, *_: Any) -> None:
        """Before every step of the optimizer (``register_step_pre_hook``): gradients may be neither whole nor averaged.

        Who never calls ``ready.backward``, such as a trainer with a loop of its own, steps as it likes.
        """
        if self.order.used and not self.acting:
            raise RuntimeError(
                "optimizer.step() was called after ready.backward(); write ready.step() in its place: it averages over "
                "the ranks, clips, steps, ticks the scheduler and clears the gradients at the end of each window"
            )

    def by_optimizer(
        self, model: Module, optimizer: Optimizer, closure: Closure | None, look: Callable[[], None]
    ) -> None:
        """Clips, steps, ticks and clears; an overflow of float16 is found on every rank alike, and skips the first two.

        ``look`` sees the gradients that a closure has made.
        """
        with self.allowed():
            self.skipped = not self._stepped(model, optimizer, closure, look)
        if not self.skipped:
            self._tick()
        if self.clears:
            optimizer.zero_grad(set_to_none=True)

    def _stepped(self, model: Module, optimizer: Optimizer, closure: Closure | None, look: Callable[[], None]) -> bool:
        def clip(held: Optimizer) -> None:
            self.grad_norm = self.driver.clip(model, self.clip, parameters(held))

        scaler = self.scaler
        if closure is not None:
            optimizer.step(closures.repeated(closure, optimizer, look, clip))
            return True
        if scaler is not None:
            scaler.unscale_(optimizer)  # a norm of scaled gradients would be clipped to nothing
        clip(optimizer)
        if scaler is None:
            optimizer.step()
            return True
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale() >= scale  # it goes down after an overflow only; torch has no other public sign

    def by_engine(self, model: Module, *, ended: bool) -> None:
        """The engine clips, steps and clears by itself; the scheduler is ours unless the plan says otherwise."""
        assert self.driver.step is not None, "an engine that steps"
        done = self.driver.step(model, ended)
        if ended:
            self.skipped = not done.applied
            self.grad_norm = done.norm if isinstance(self.clip, ClipNorm) else None
        if done.applied and self.plan.owners.scheduler == "prepkit":
            self._tick()

    @property
    def ticked_here(self) -> Any:
        """The scheduler that a step ticks; None where nobody does, or the user or the engine."""
        owners = self.plan.owners
        engine_ticks = self.driver.step is not None and owners.scheduler != "prepkit"
        return None if engine_ticks or not owners.scheduler_ticks else self.scheduler

    def _tick(self) -> None:
        if (scheduler := self.ticked_here) is not None:
            for _ in range(self.plan.owners.scheduler_ticks):
                scheduler.step()
            self.order.after_tick(scheduler)


def parameters(optimizer: Optimizer) -> list[Parameter]:
    """All that it holds, group by group."""
    return [param for group in optimizer.param_groups for param in group["params"]]
