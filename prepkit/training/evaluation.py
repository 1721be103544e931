"""Evaluation inside a training run: ``with ready.evaluating():`` leaves everything after it as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from prepkit.objects import zero_masters
from prepkit.objects.deepspeed import keeps_masters

WRAPPERS = frozenset({"torch", "deepspeed"})
"""Packages whose modules have a ``train`` of their own that writes no weight."""


@contextmanager
def in_eval_mode(
    model: Module, optimizers: Sequence[Any], settle: Callable[[Module], None], forget: Callable[[], None]
) -> Iterator[None]:
    """Put modules, and optimizers with an ``eval``, in eval mode inside; nothing has a gradient there.

    Collective at its start where DDP has buffers: all ranks take those of rank 0, once, and no forward inside waits for
    another rank. Afterwards ``training`` of every module is what it was, one by one, and ``settle`` has freed what a
    forward has left gathered. An optimizer inside DeepSpeed's moves master weights, which the model is given then.
    """
    flags = [(module, module.training) for module in model.modules()]
    switched = []
    try:
        with torch.no_grad(), _own_buffers(model):
            model.eval()
            for optimizer in optimizers:
                if _trains(_inner(optimizer)):
                    _switch(optimizer, model, forget, training=False)
                    switched.append(optimizer)
            yield
    finally:
        for optimizer in switched:
            _switch(optimizer, model, forget, training=True)
        _restore(flags)
        settle(model)


def swaps_weights(model: Module, optimizers: Sequence[Any]) -> bool:
    """True where other weights may be in the model in eval mode: an optimizer has one, or a module does more there."""
    kinds = {type(module) for module in model.modules()}
    own = any(kind.train is not Module.train and kind.__module__.partition(".")[0] not in WRAPPERS for kind in kinds)
    return own or any(_has_mode(_inner(optimizer)) for optimizer in optimizers)


def _inner(optimizer: Any) -> Any:
    """The one that was given: DeepSpeed's stands around it."""
    return optimizer.optimizer if keeps_masters(optimizer) else optimizer


def _switch(optimizer: Any, model: Module, forget: Callable[[], None], *, training: bool) -> None:
    """Its weights are in the model then: none that a forward has gathered before are left, and masters are copied."""
    inner = _inner(optimizer)
    forget()  # under FSDP1 what a forward has gathered is what the optimizer would move
    with zero_masters.in_groups(optimizer):
        inner.train() if training else inner.eval()
    if inner is not optimizer:
        zero_masters.refresh(model)


def _trains(optimizer: Any) -> bool:
    """True where it has a mode, and trains: schedule-free optimizers say so in their groups."""
    return _has_mode(optimizer) and all(group.get("train_mode", True) for group in optimizer.param_groups)


def _has_mode(optimizer: Any) -> bool:
    return callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None))


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
