"""What a script gives to ``prepare``, told by what it is."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from prepkit.compat.accelerate.not_offered import NotOffered
from prepkit.compat.accelerate.stepped import SteppedOptimizer, SteppedScheduler
from prepkit.loading.loader import Loader


def place_of(given: Any) -> str:
    """``model``, ``optimizer``, ``scheduler`` or ``loader``. Raises ``NotOffered`` for anything else."""
    kinds = {
        "model": torch.nn.Module,
        "optimizer": Optimizer,
        "scheduler": LRScheduler | ReduceLROnPlateau,
        "loader": DataLoader,
    }
    for place, kind in kinds.items():
        if isinstance(given, kind):
            return place
    raise NotOffered(f"prepare({type(given).__name__})", "give modules, optimizers, schedulers and DataLoaders")


def is_prepared(given: Any) -> bool:
    """Whether it comes from a ``prepare``; a model says nothing of that."""
    return isinstance(given, Loader | SteppedOptimizer | SteppedScheduler)


def only(objects: list[Any], places: list[str], kind: str) -> Any:
    """The object of that kind; None where none is given. Raises ``NotOffered`` for several."""
    found = [given for given, place in zip(objects, places, strict=True) if place == kind]
    if len(found) > 1:
        raise NotOffered(f"prepare with {len(found)} of kind {kind}", "give each model an Accelerator of its own")
    return found[0] if found else None
