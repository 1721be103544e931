"""What ends a window: gradients are clipped, the optimizer steps, the scheduler ticks; or the engine does all that."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, field
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from prepkit.config import Clip, ClipNorm
from prepkit.live.training import closures
from prepkit.live.training.clearing import ClearingGuard, guarded
from prepkit.live.training.closures import Closure
from prepkit.live.training.drivers import Driver
from prepkit.live.training.engine_steps import EngineSteps, kept_apart
from prepkit.live.training.loop_order import LoopOrder, LoopOutOfOrder
from prepkit.live.training.model_changes import ModelChanges
from prepkit.live.training.own_loop import OwnLoop
from prepkit.live.training.plain_state import refuse_state, refuse_weights
from prepkit.plan import Plan


@define(kw_only=True)
class OptimizerStep:
    """Who acts is the plan's; ``skipped`` and ``grad_norm`` are of the last window."""

    plan: Plan
    driver: Driver
    order: LoopOrder
    changes: ModelChanges
    clip: Clip
    """The plan's; a loop that says it per window, as accelerate's does, puts another here."""
    scheduler: Any
    scaler: torch.amp.GradScaler | None
    own_loop: OwnLoop = field(init=False)
    _hooks: list[RemovableHandle | ClearingGuard | EngineSteps] = field(factory=list, init=False)
    clears: bool = True
    """Whether the gradients go when a window has ended; no in a loop that clears them, as accelerate's does."""
    skipped: bool = False
    grad_norm: torch.Tensor | None = None
    acting: bool = False
    """Whether the optimizer steps because ``ready.step`` says so, or torch makes room for state that is read."""

    def __attrs_post_init__(self) -> None:
        self.own_loop = OwnLoop(plan=self.plan, scaler=self.scaler)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Inside, the optimizer may step."""
        self.acting = True
        try:
            yield
        finally:
            self.acting = False

    def watch(self, model: Module, optimizers: Sequence[Optimizer]) -> None:
        """Looks at each step and ``zero_grad`` of these optimizers until ``release``; refers to the model weakly."""
        weak = weakref.ref(model)

        def before(optimizer: Optimizer, *_: Any) -> None:
            if not self.acting and (watched := weak()) is not None:
                self._before_foreign(watched, optimizer)

        if self.driver.step is None:
            self._hooks += [optimizer.register_step_pre_hook(before) for optimizer in optimizers]
            self._hooks += [optimizer.register_load_state_dict_pre_hook(refuse_state) for optimizer in optimizers]
            hook = model.register_load_state_dict_pre_hook(_before_weights)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)
        self._hooks += [EngineSteps(one, lambda: self.acting) for one in optimizers if kept_apart(one)]
        clearing = [
            optimizer for optimizer in optimizers if hasattr(optimizer, "zero_grad")
        ]  # ZeRO-3's may clear nothing
        self._hooks += [guarded(optimizer, self._before_clearing) for optimizer in clearing]

    def release(self) -> None:
        """Lets the optimizers alone again."""
        while self._hooks:
            self._hooks.pop().remove()

    def _before_foreign(self, model: Module, optimizer: Optimizer) -> None:
        """Raises ``LoopOutOfOrder`` for a step beside ``ready.backward``: gradients are neither whole nor averaged.

        Who never calls that, such as a trainer with a loop of its own, steps as it likes where that leaves out nothing
        (``OwnLoop``).
        """
        if not self.order.used:
            self.own_loop.before_step(model, optimizer)
            self.driver.settle(model)
            self.changes.before_step()
            return
        raise LoopOutOfOrder(
            "optimizer.step() was called after ready.backward(); write ready.step() in its place: it averages over "
            "the ranks, clips, steps, ticks the scheduler and clears the gradients at the end of each window"
        )

    def _before_clearing(self) -> None:
        """Raises ``LoopOutOfOrder`` for a ``zero_grad`` that is not the end of a window."""
        if not self.acting:
            self.order.before_clearing()

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
            with self.allowed():
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
        with self.allowed():
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


def _before_weights(model: Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    if not prefix:
        refuse_weights(model, state)


def parameters(optimizer: Optimizer) -> list[Parameter]:
    """All that it holds, group by group."""
    return [param for group in optimizer.param_groups for param in group["params"]]
