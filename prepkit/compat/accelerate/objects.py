"""What a script gives to ``prepare``, told by what it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from prepkit.compat.accelerate.not_offered import NotOffered
from prepkit.compat.accelerate.stepped import SteppedOptimizer, SteppedScheduler
from prepkit.loading.loader import Loader

KINDS = {
    "model": torch.nn.Module,
    "optimizer": Optimizer,
    "scheduler": LRScheduler | ReduceLROnPlateau,
    "loader": DataLoader,
}


def place_of(given: Any) -> str:
    """``model``, ``optimizer``, ``scheduler`` or ``loader``; empty for anything else, which stays as it is.

    Raises ``NotOffered`` for what only accelerate's ``prepare`` knows.
    """
    if type(given).__name__ in ("DummyOptim", "DummyScheduler", "MegatronLMDummyScheduler"):
        what = "give a torch.optim.AdamW and a scheduler of torch, or Accelerator(config=pk.Config(optimizer=...))"
        raise NotOffered(f"prepare({type(given).__name__})", what)
    return next((place for place, kind in KINDS.items() if isinstance(given, kind)), "")


def is_prepared(given: Any) -> bool:
    """Return whether it comes from a ``prepare``; a model says nothing of that."""
    return isinstance(given, Loader | SteppedOptimizer | SteppedScheduler)


def belong(models: Sequence[Any], optimizers: Sequence[Any]) -> bool:
    """Return whether there is one model, and one optimizer that holds parameters of it alone."""
    if len(models) != 1 or len(optimizers) != 1:
        return False
    own = {id(param) for param in models[0].parameters()}
    return all(id(param) in own for group in optimizers[0].param_groups for param in group["params"])
