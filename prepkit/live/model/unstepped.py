"""Optimizer state that no step has made: torch's Adagrad begins with some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def unstepped(state: Mapping[str, Any]) -> bool:
    """Whether one parameter's state says that no step was made; one that counts no steps does not."""
    step = state.get("step")
    if isinstance(step, torch.Tensor):
        return not step.is_meta and step.numel() == 1 and not step.item()
    return step == 0
