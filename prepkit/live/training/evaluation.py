"""Evaluation inside a training run: ``with ready.evaluating():`` leaves everything behind it as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from prepkit.live.training.loop_order import LoopOutOfOrder

if TYPE_CHECKING:
    from prepkit.live.training.loop_view import LoopView


@define(eq=False)
class Evaluation:
    """Whether the prepared model is being evaluated."""

    depth: int = 0
    """How many ``evaluating()`` are open."""
    switched: list[Any] = field(factory=list)
    """Optimizers that evaluate with other weights than they train with, as schedule-free ones do, and now do."""

    averages: int = 0
    """How many ``ema.applied()`` are open: averages stand in the place of what is trained."""

    def refuse(self, call: str) -> None:
        """Raises ``LoopOutOfOrder`` for a call that trains."""
        self._refuse_averages(call)
        if self.depth:
            raise LoopOutOfOrder(
                f"{call} was called inside ready.evaluating(), where nothing has a gradient; end the with block first"
            )

    def refuse_saving(self, call: str) -> None:
        """Raises ``LoopOutOfOrder`` where the weights that lie there may not be those that are trained.

        Optimizers without a schedule put others in their place, and modules in eval mode may: adapters that are merged
        there would be added again by the run that goes on.
        """
        self._refuse_averages(call)
        if self.depth:
            who = f"{type(self.switched[0]).__name__} has" if self.switched else "a module in eval mode may have"
            raise LoopOutOfOrder(
                f"{call} was called inside ready.evaluating(), where {who} put other weights in the place of "
                "those that it trains; end the with block first"
            )

    def _refuse_averages(self, call: str) -> None:
        if self.averages:
            raise LoopOutOfOrder(
                f"{call} was called inside ema.applied(), where averages stand in the place of the weights that are "
                "trained; end the with block first"
            )

    @contextmanager
    def running(self, ready: LoopView, settle: Callable[[Module], None]) -> Iterator[None]:
        """Inside, modules are in eval mode, optimizers with an ``eval`` as well, and nothing has a gradient.

        Collective at its start where DDP has buffers: all ranks take those of rank 0, once, and no forward inside waits
        for another rank. Behind it ``training`` of every module is what it was, one by one, and ``settle`` has freed
        what a forward has left gathered. Raises ``LoopOutOfOrder`` between ``backward`` and ``step``.
        """
        if ready.in_micro_batch:
            raise LoopOutOfOrder(
                "ready.evaluating() was entered between ready.backward() and ready.step(); end the micro-batch first, "
                "because not every engine keeps its gradients through a forward there"
            )
        flags = [(module, module.training) for module in ready.model.modules()]
        before = list(self.switched)
        self.depth += 1
        try:
            with torch.no_grad(), _own_buffers(ready.model):
                ready.model.eval()
                for optimizer in filter(_trains, ready.optimizers):
                    optimizer.eval()  # type: ignore[attr-defined]  # ``_trains`` has asked for it
                    self.switched.append(optimizer)
                yield
        finally:
            self.depth -= 1
            for optimizer in self.switched[len(before) :]:
                optimizer.train()
            self.switched = before
            _restore(flags)
            settle(ready.model)


def _trains(optimizer: Any) -> bool:
    """Whether it has a mode, and trains: schedule-free optimizers say so in their groups."""
    has_mode = callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None))
    return has_mode and all(group.get("train_mode", True) for group in optimizer.param_groups)


def _restore(flags: list[tuple[Module, bool]]) -> None:
    """Parents before children, through ``train``: some modules do more there, as LoRA layers that merge in ``eval``."""
    for module, training in flags:
        if module.training != training:
            module.train(training)
    for module, training in flags:  # one that is not to follow its parents has its own idea of ``train``
        module.training = training


@contextmanager
def _own_buffers(model: Module) -> Iterator[None]:
    """Inside, DDP's forward broadcasts no buffers: a rank with fewer batches, or none, would be waited for."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    before = model.require_forward_param_sync
    model.require_forward_param_sync = True
    try:
        if model.will_sync_module_buffers():  # type: ignore[no-untyped-call]  # torch has no types
            model._sync_buffers()  # type: ignore[no-untyped-call]  # what its forward would call
        model.require_forward_param_sync = False
        yield
    finally:
        model.require_forward_param_sync = before
