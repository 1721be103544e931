"""What the parts of a loop may ask of the whole: ``Prepared`` is one."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.nn import Module
from torch.optim import Optimizer

from prepkit.plan import Plan


class LoopView(Protocol):
    """Read only, but for the watch."""

    _watch: Any
    """Refuses optimizers that the plan does not know, until ``close``."""

    @property
    def model(self) -> Module:
        """What the loop calls."""
        ...

    @property
    def optimizer(self) -> Optimizer | None:
        """What is stepped; one that stands for all where there are several."""
        ...

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Each of them."""
        ...

    @property
    def plan(self) -> Plan:
        """What was applied."""
        ...

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Of float16."""
        ...

    @property
    def engine_steps(self) -> bool:
        """Whether the engine clips, steps and clears by itself."""
        ...

    @property
    def in_step(self) -> bool:
        """Whether ``step`` is under way."""
        ...

    @property
    def in_micro_batch(self) -> bool:
        """Whether a ``backward`` waits for its ``step``."""
        ...

    @property
    def in_use(self) -> bool:
        """Whether ``backward`` was ever called."""
        ...
