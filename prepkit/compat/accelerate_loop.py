"""Optimizer and scheduler as a script for accelerate steps them: a step ends the micro-batch of ``Prepared``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, field

from prepkit.compat.not_offered import NotOffered
from prepkit.config import Clip, ClipNorm, ClipValue
from prepkit.live.training.prepared import Prepared


@define
class Loop:
    """Where a script is between the forward of a micro-batch and its end."""

    ready: Prepared
    planned: Clip
    """How the plan clips, where the script does not say it."""
    boundary: bool = field(default=True, init=False)
    """Whether the present micro-batch ends its window (accelerate's ``sync_gradients``)."""
    stepped: bool = field(default=False, init=False)
    """Whether the present micro-batch has been ended."""
    inside: bool = field(default=False, init=False)
    """Whether the script is inside ``accumulate``."""

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """One micro-batch; one whose optimizer was not stepped, because it ends no window, is counted all the same."""
        self.inside, self.stepped = True, False
        try:
            with self.ready.accumulate():
                yield
                if not (self.stepped or self.boundary) and self.ready.pending:
                    self.step()
        finally:
            self.inside = False

    def backward(self, loss: torch.Tensor) -> None:
        """Notes whether the window ends here."""
        if self.ready.plan.owners.accumulation_steps > 1 and not self.inside:
            raise NotOffered(
                "gradient_accumulation_steps without accumulate", "write `with accelerator.accumulate(model):`"
            )
        self.stepped = False
        self.boundary = self.ready.ends_window
        self.ready.backward(loss)

    def step(self) -> None:
        """Ends the micro-batch."""
        self.ready.step()
        self.stepped = True
        self._clip_with(self.planned)  # until the script asks again

    def clip(self, parameters: Any, clip: ClipNorm | ClipValue) -> None:
        """Lets ``step`` clip so, where gradients are averaged and unscaled; DeepSpeed has to know before."""
        if self.ready.engine_steps:
            raise NotOffered("clipping under DeepSpeed", "write gradient_clipping into its config")
        given = {id(param) for param in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)}
        held = (param for one in self.ready.optimizers for group in one.param_groups for param in group["params"])
        if any(id(param) not in given for param in held):
            raise NotOffered(
                "clipping a part of the parameters", "give model.parameters(), or write a loop of your own"
            )
        if self.boundary:
            self._clip_with(clip)

    def _clip_with(self, clip: Clip) -> None:
        self.ready._end.clip = clip


@define(slots=False)
class SteppedOptimizer:
    """The optimizer of a plan. Everything but ``step`` and ``zero_grad`` is its own."""

    _loop: Loop

    @property
    def optimizer(self) -> Any:
        """Torch's optimizer, as the plan has bound it."""
        return self._loop.ready.optimizer

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last window ended without a step, because a gradient overflowed."""
        return self._loop.ready.skipped

    def step(self, closure: Any = None) -> None:
        """Ends the micro-batch: clips, steps and clears where the window ends, and counts where it does not."""
        if closure is not None:
            raise NotOffered("optimizer.step(closure)", "write ready.step(closure)")
        self._loop.step()

    def zero_grad(self, set_to_none: bool = True) -> None:  # as torch has it
        """Nothing: gradients are cleared when the optimizer has stepped, and kept inside a window, as in accelerate."""
        if self._loop.boundary and self._loop.ready.in_micro_batch:
            raise NotOffered(f"zero_grad(set_to_none={set_to_none}) before the step", "call optimizer.step() first")

    def train(self) -> None:
        """Nothing, as for every optimizer but those that average themselves."""

    eval = train

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


@define(slots=False)
class SteppedScheduler:
    """The scheduler of a plan, stepped where the optimizer was; everything else is its own (behaviour W-16)."""

    _loop: Loop
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
            self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)
