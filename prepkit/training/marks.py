"""How a loop sees that something else has cleared or written its gradients, without walking through the model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import define, field
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from prepkit.facts.loop import Gradients, LoopPlan, LoopState


@define(eq=False, repr=False)
class Marks:
    """Looks at all gradients in the first window, and at those of one parameter in the others."""

    plan: LoopPlan
    model: Module
    trained: Callable[[], list[Parameter]]
    """Those of the optimizers: a forward of FSDP2 leaves others in the model, gathered."""
    holds: Callable[[Module], bool] | None
    """Looks for gradients where ``.grad`` does not show them; None: it shows all."""
    _usual: Parameter | None = field(default=None, init=False)
    """The parameter that had a gradient when somebody last looked: asking it first saves a walk through the model."""
    _kept: Parameter | None = field(default=None, init=False)
    """A parameter that had a gradient when the last micro-batch ended inside a window; None: none had, as in FSDP2."""
    _mark: tuple[int, int] | None = field(default=None, init=False)
    """Identity of the usual parameter's gradient after the last backward, and how often it had been written."""
    _writes: tuple[tuple[int, ...], tuple[float, ...]] | None = field(default=None, init=False)
    """How often each gradient had been written after the last backward; None: nobody looked."""
    _looked: bool = field(default=False, init=False)
    """The end of the first window was looked at."""

    def before_backward(self, state: LoopState) -> Gradients:
        """Look at gradients before a backward adds to them."""
        if state.backwards and not state.more:
            hidden = isinstance(self.model, FSDPModule) and not state.averaging  # gathered, until they are averaged
            return Gradients.UNKNOWN if self.plan.engine_steps or hidden else _there(self._first() is not None)
        if state.backwards or state.micro_batches:
            return self._since_last_backward() if self.plan.shows_gradients else Gradients.UNKNOWN
        if not self.plan.clears:
            return Gradients.UNKNOWN
        if not self.plan.shows_gradients:
            return Gradients.UNKNOWN if self.holds is None else _there(self.holds(self.model))
        usual = self._usual is not None and self._usual.grad is not None
        return _there(usual if state.used else self._first() is not None)

    def _since_last_backward(self) -> Gradients:
        if self._kept is None:
            return Gradients.UNKNOWN
        if self._kept.grad is None:
            return Gradients.NONE
        written = self._mark != (now := self._marked()) and self._rewritten(now)
        return Gradients.WRITTEN if written else Gradients.UNKNOWN

    def after_backward(self) -> None:
        """Note how often each gradient was written until the first window is over; then that of one alone."""
        if self.plan.shows_gradients and not self._looked:
            self._writes = _writes(self.model)
        self._mark = self._marked()

    def before_step(self) -> Gradients:
        """Look at the gradients that a window is about to step: at all in the first one, at one in the others."""
        if self._usual is not None and self._usual.grad is None:
            self._usual = self._first()
            if self._usual is None:
                return Gradients.NONE
        if self._looked:
            written = self._mark not in (None, now := self._marked()) and self._rewritten(now)
        else:
            written = self._writes is not None and self._writes != _writes(self.model)
            if self.plan.shows_gradients:
                self._usual = self._first()
        return Gradients.WRITTEN if written else Gradients.UNKNOWN

    def after_step(self, *, ended: bool) -> None:
        """Note what stays in the model for the next micro-batch."""
        self._looked = self._looked or ended
        self._kept = None
        if self.plan.shows_gradients and not ended:
            if self._usual is None or self._usual.grad is None:
                self._usual = self._first()
            self._kept = self._usual
            self._mark = self._marked()

    def forget(self) -> None:
        """No window is open."""
        self._kept = None

    def _first(self) -> Parameter | None:
        return next((param for param in self.trained() if param.grad is not None), None)

    def _rewritten(self, now: tuple[int, int] | None) -> bool:
        """Whether a gradient other than after the last backward was written; DDP lays its own anew in a forward."""
        grad = None if self._usual is None else self._usual.grad
        laid = grad is not None and grad._is_view() and None not in (now, self._mark)
        return not (laid and now[0] != self._mark[0])  # type: ignore[index]

    def _marked(self) -> tuple[int, int] | None:
        gradient = None if self._usual is None else self._usual.grad
        return None if gradient is None or isinstance(gradient, DTensor) else (id(gradient), gradient._version)


def _there(some: bool) -> Gradients:
    return Gradients.THERE if some else Gradients.NONE


def _writes(model: Module) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The version counter of each gradient, which torch raises at every write in place; of parts of DTensors the sum.

    torch counts what ``fully_shard`` adds to the part of a DTensor, and no operation on the DTensor itself.
    """
    grads = [param.grad for param in model.parameters()]
    parts = [grad.to_local().sum() for grad in grads if isinstance(grad, DTensor)]
    sums = torch.stack([part.to(torch.float32) for part in parts]).nan_to_num().tolist() if parts else ()
    return tuple(-1 if grad is None else grad._version for grad in grads), tuple(sums)
