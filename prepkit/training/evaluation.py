"""Evaluation inside a training run: ``with ready.evaluating():`` leaves everything after it as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def in_eval_mode(model: Module, optimizers: Sequence[Any], settle: Callable[[Module], None]) -> Iterator[None]:
    """Put modules, and optimizers with an ``eval``, in eval mode inside; nothing has a gradient there.

    Collective at its start where DDP has buffers: all ranks take those of rank 0, once, and no forward inside waits for
    another rank. Afterwards ``training`` of every module is what it was, one by one, and ``settle`` has freed what a
    forward has left gathered.
    """
    flags = [(module, module.training) for module in model.modules()]
    switched = []
    try:
        with torch.no_grad(), _own_buffers(model):
            model.eval()
            for optimizer in filter(_trains, optimizers):
                optimizer.eval()
                switched.append(optimizer)
            yield
    finally:
        for optimizer in switched:
            optimizer.train()
        _restore(flags)
        settle(model)


def _trains(optimizer: Any) -> bool:
    """True where it has a mode, and trains: schedule-free optimizers say so in their groups."""
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
