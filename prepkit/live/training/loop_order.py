"""The order of a training loop: forward, ``backward``, ``step``. Slips that would train wrongly without a word raise.

Gradients are averaged, divided and scaled only where each of the three is called as often, and through the object, that
the engine expects. What has run is counted here, once per call and without looking at any gradient, so that every
window is held to it and not the first one alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from attrs import define
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

_ENTRY = 'write Config(entry_points=("<method>",)) and call ready.model.<method>(...)'


class LoopOutOfOrder(RuntimeError):
    """Forward, ``backward`` and ``step`` do not follow each other so that the gradients would be right."""


@define
class LoopOrder:
    """What has run since the last ``step``, and since the end of the last window."""

    shows_gradients: bool = True
    """Whether ``.grad`` holds a window's gradients between micro-batches, as under neither FSDP1 nor ZeRO."""
    used: bool = False
    """Whether ``backward`` has ever been called, so that gradients are divided and averaged for ``step`` alone."""
    _armed: bool = False
    """Whether DDP's forward has run since the last backward: its reducer averages one backward per forward."""
    _inside: bool = False
    """Whether a micro-batch has ended that did not end its window."""
    _backwards: int = 0
    """Calls of ``backward`` in this micro-batch."""
    _more: bool = False
    """Whether the last of them has announced another one."""
    _cleared: bool = False
    """Whether the gradients of this micro-batch were cleared after its backward."""
    _averaged: bool = False
    """Whether DDP has averaged the gradients of this window."""
    _kept: Parameter | None = None
    """A parameter that had a gradient when the last micro-batch ended inside a window; None: none had, as in FSDP2."""
    _usual: Parameter | None = None
    """The parameter that had a gradient when somebody last looked: asking it first saves a walk through the model."""
    _mark: tuple[int, int] | None = None
    """Which gradient that was after the last backward, and how often it had been written."""
    _written: tuple[tuple[int, ...], tuple[float, ...]] | None = None
    """How often each gradient had been written after the last backward; None: nobody looked."""
    _changes_looked_at: bool = False
    _told_of_writes: bool = False
    _ticked: int | None = None
    """Where the scheduler stood after the last window; None: nobody looked, or it was put elsewhere since."""

    @property
    def begun(self) -> bool:
        """Whether this micro-batch has had a backward, so that its gradients wait for ``step``."""
        return self._backwards > 0

    def watch(self, model: Module) -> None:
        """Hears DDP's forward end, and FSDP1's begin; other engines average in hooks of the parameters or units."""
        if isinstance(model, DistributedDataParallel):
            model.register_forward_hook(self.forward_ran)
        if isinstance(model, FullyShardedDataParallel):
            model.register_forward_pre_hook(self.before_forward)

    def before_forward(self, model: Module, *_: Any) -> None:
        """Raises ``LoopOutOfOrder`` where FSDP1 holds averaged gradients that a forward without gradients would lose.

        Seen in torch 2.13: what the last backward of a window has averaged is gone after such a forward.
        """
        if self._backwards and not torch.is_grad_enabled() and model._sync_gradients:
            raise LoopOutOfOrder(
                "a forward without gradients ran between ready.backward() and ready.step(), where FSDP1 loses the "
                "gradients of the window; move it behind ready.step()"
            )

    def forward_ran(self, model: Module, *_: Any) -> None:
        """DDP's forward has run. Only one that a backward can follow makes the reducer wait for gradients."""
        if torch.is_grad_enabled() and model.require_backward_grad_sync:
            self._armed = True

    def before_window(self, trained: Iterable[Parameter]) -> None:
        """Raises ``LoopOutOfOrder`` where a window would begin with gradients of something else.

        ``trained`` are those of the optimizers: a forward of FSDP2 leaves others in the model, gathered.
        """
        if self._backwards or self._inside or not self.shows_gradients:
            return
        usual = self._usual is not None and self._usual.grad is not None
        if usual if self.used else any(param.grad is not None for param in trained):
            raise LoopOutOfOrder(
                "gradients lie in the model before the first ready.backward() of a window, as after a loss.backward() "
                "by hand, and would be added to those of the window. Remove that call, and add losses up for one "
                "ready.backward(loss); where the gradients are left over from before, call "
                "ready.optimizer.zero_grad() first"
            )

    def before_backward(self, model: Module, *, more: bool, keeps: bool = True) -> None:
        """Raises ``LoopOutOfOrder`` where ``step`` was forgotten, or DDP's reducer would sleep through the backward.

        ``keeps``: gradients lie in ``.grad`` until ``step``, so that a micro-batch whose gradients the user has thrown
        away can be told from one whose ``step`` was forgotten.
        """
        if self._backwards and not self._more and (not keeps or _any_gradient(model)):
            raise LoopOutOfOrder(
                "ready.backward() was called again without ready.step() since; write ready.step() after every "
                "micro-batch, also where it does not end a window: it counts them. Where one micro-batch has several "
                "losses, add them up for one backward, or write ready.backward(loss, more=True) for all but the last"
            )
        if not self._backwards and self._kept is not None and self._kept.grad is None:
            raise LoopOutOfOrder(
                "the gradients of this window's first micro-batches are gone: zero_grad() was called inside it, or "
                "they were set to None. Remove that: ready.step() clears the gradients at the end of each window"
            )
        if self._kept is not None and self._mark != self._marked() and not self._told_of_writes:
            self._told_of_writes = True
            self._tell_of_writes(scaled=False)
        if isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync:
            if not self._armed:
                raise LoopOutOfOrder(
                    "DistributedDataParallel averages one backward per forward of its own, and none has run since the "
                    "last backward: these gradients would be each rank's alone. Call ready.model(...) itself; for "
                    f"another method than forward {_ENTRY}"
                )
            self._armed, self._averaged = False, True
        self.used, self._more, self._cleared = True, more, False
        self._backwards += 1

    def after_backward(self, model: Module) -> None:
        """Notes how often each gradient was written, until ``before_window_end`` has looked; then that of one alone."""
        if self.shows_gradients and not self._changes_looked_at:
            self._written = _writes(model)
        self._mark = self._marked()

    def before_window_end(self, model: Module, *, scaled: bool) -> None:
        """Tells, once, of gradients that something else has written since the last backward.

        Of all in the first window, of one in the others. Warns, as what was written may be meant; raises
        ``LoopOutOfOrder`` where the loss is scaled, so that a norm or a sum of such gradients is none, and where all
        gradients are gone.
        """
        if self._usual is not None and self._usual.grad is None:
            self._usual = next((param for param in model.parameters() if param.grad is not None), None)
            if self._usual is None:
                raise LoopOutOfOrder(
                    "no parameter has a gradient: something has set them to None between ready.backward() and "
                    "ready.step(), as model.zero_grad() does. Remove that call: ready.step() clears the gradients at "
                    "the end of each window"
                )
        if self._changes_looked_at:
            written = self._mark is not None and self._mark != self._marked() and not self._told_of_writes
        else:
            written = self._written is not None and self._written != _writes(model)
            if self.shows_gradients:
                self._usual = next((param for param in model.parameters() if param.grad is not None), None)
        self._changes_looked_at = True
        if written:
            self._told_of_writes = True
            self._tell_of_writes(scaled=scaled)

    def _marked(self) -> tuple[int, int] | None:
        gradient = None if self._usual is None else self._usual.grad
        return None if gradient is None or isinstance(gradient, DTensor) else (id(gradient), gradient._version)

    def _tell_of_writes(self, *, scaled: bool) -> None:
        what = (
            "the gradients of a window were written beside ready.backward() and ready.step(), as clip_grad_norm_() "
            "and a loss.backward() by hand do. Remove that call: write Config(clip=pk.ClipNorm(1.0)), or ClipValue, by "
            "which ready.step() clips, and add losses up for one ready.backward(loss)"
        )
        if scaled:
            raise LoopOutOfOrder(f"{what}. Under float16 they are still multiplied by the loss scale")
        warnings.warn(what, stacklevel=6)

    def before_step(self, model: Module, *, ended: bool) -> None:
        """Raises ``LoopOutOfOrder`` where no ``backward`` of this micro-batch was prepkit's, or DDP averaged none."""
        if not self._backwards:
            raise LoopOutOfOrder(
                "ready.step() was called without ready.backward(loss) since the last step; gradients of a "
                "loss.backward() by hand are not divided by the number of micro-batches, not scaled under float16, and "
                "not taken by DeepSpeed. Write ready.backward(loss) in its place; leave out both for a batch without "
                "a loss, and end a window early with ready.accumulate(last=True)"
            )
        if self._cleared:
            raise LoopOutOfOrder(
                "optimizer.zero_grad() was called between ready.backward() and ready.step(), which would train "
                "nothing. Remove that call: ready.step() clears the gradients at the end of each window. To leave a "
                "batch out, leave out its ready.step() as well"
            )
        if self._more:
            raise LoopOutOfOrder(
                "ready.backward(loss, more=True) has announced another backward of this micro-batch, and ready.step() "
                "came first; leave out more=True for the last loss"
            )
        if ended and isinstance(model, DistributedDataParallel) and not self._averaged:
            raise LoopOutOfOrder(
                "DistributedDataParallel has averaged no gradient of this window, because its no_sync() was used; "
                "leave it to ready.step() and Config(accumulation=...) which micro-batches average"
            )

    def before_clearing(self) -> None:
        """Raises ``LoopOutOfOrder`` where gradients of earlier micro-batches of this window would be cleared.

        Those of one that has just run may be: so it is thrown away. Under every engine alike, though ZeRO 2 and FSDP2
        would not lose the others.
        """
        if self._inside:
            raise LoopOutOfOrder(
                "optimizer.zero_grad() was called inside an accumulation window, whose first micro-batches it would "
                "throw away. Remove that call: ready.step() clears the gradients at the end of each window"
            )
        self._cleared = self._backwards > 0

    def before_tick(self, scheduler: Any) -> None:
        """Raises ``LoopOutOfOrder`` where somebody else has stepped the scheduler since ``after_tick``."""
        at = getattr(scheduler, "last_epoch", None)
        if self._ticked is not None and at != self._ticked:
            raise LoopOutOfOrder(
                f"the scheduler was stepped beside ready.step(), from {self._ticked} to {at}: remove scheduler.step(), "
                "or write Config(scheduler_ticks=0) and step it yourself"
            )

    def after_tick(self, scheduler: Any) -> None:
        """Notes where the scheduler stands."""
        self._ticked = getattr(scheduler, "last_epoch", None)

    def after_resume(self) -> None:
        """The scheduler stands elsewhere, and no window is open."""
        self._ticked = self._kept = None
        self._inside = False

    def after_step(self, model: Module, *, ended: bool) -> None:
        """The next micro-batch begins."""
        self._backwards, self._cleared = 0, False
        self._inside = not ended
        self._averaged = self._averaged and not ended
        self._kept = None
        if self.shows_gradients and not ended:
            if self._usual is None or self._usual.grad is None:
                self._usual = next((p for p in model.parameters() if p.grad is not None), None)
            self._kept = self._usual
            self._mark = self._marked()


def _any_gradient(model: Module) -> bool:
    return any(param.grad is not None for param in model.parameters())


def _writes(model: Module) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The version counter of each gradient, which torch raises at every write in place; of parts of DTensors the sum.

    torch counts what ``fully_shard`` adds to the part of a DTensor, and no operation on the DTensor itself.
    """
    grads = [param.grad for param in model.parameters()]
    parts = [grad.to_local().sum() for grad in grads if isinstance(grad, DTensor)]
    sums = torch.stack([part.to(torch.float32) for part in parts]).nan_to_num().tolist() if parts else ()
    return tuple(-1 if grad is None else grad._version for grad in grads), tuple(sums)
