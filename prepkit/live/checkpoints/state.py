"""Model and optimizer of a prepared run, whatever the engine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch.nn import Module

from prepkit.live.checkpoints import torch_state, zero_masters, zero_state
from prepkit.live.checkpoints.contents import Contents
from prepkit.live.model.names import known_bases


def is_deepspeed(model: Module) -> bool:
    """Whether DeepSpeed holds the model."""
    return "DeepSpeedEngine" in known_bases(type(model))  # by name, so that DeepSpeed need not be there


def held(model: Module, optimizer: Any) -> Contents:
    """What stands here; nothing of it is changed. Raises ``CheckpointFailed`` for what cannot be read."""
    return zero_state.held(model, optimizer) if is_deepspeed(model) else torch_state.held(model, optimizer)


def filled(
    model: Module, optimizer: Any, stored: Mapping[str, tuple[int, ...] | None], groups: list[dict[str, Any]]
) -> AbstractContextManager[Contents]:
    """Yields what is to be filled from a checkpoint that holds these names; puts it in place afterwards."""
    if is_deepspeed(model):
        return zero_state.filled(model, optimizer, stored, groups)
    return torch_state.filled(model, optimizer, stored, groups)


def stepping(model: Module, optimizer: Any) -> Any:
    """The optimizer that does the work: under DeepSpeed the one inside its own."""
    return zero_masters.base(model) if optimizer is not None and is_deepspeed(model) else optimizer


def engine_state(model: Module) -> dict[str, Any]:
    """What the engine counts by itself, as plain data; empty for torch's engines."""
    return zero_state.engine_state(model) if is_deepspeed(model) else {}


def set_engine_state(model: Module, counted: dict[str, Any] | None) -> None:
    """Puts back what ``engine_state`` gave; that of another engine is left out."""
    if counted and is_deepspeed(model):
        zero_state.set_engine_state(model, counted)
