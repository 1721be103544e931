"""Methods besides ``forward`` that run as the forward does, and what has to be done for them under each engine."""

from __future__ import annotations

from typing import Literal

from prepkit.config import DDP, FSDP1, FSDP2, Config, DeepSpeed, Intent
from prepkit.facts import ModelFacts
from prepkit.facts.model import WELL_KNOWN


def named(cfg: Config, model: ModelFacts) -> tuple[str, ...]:
    """The methods that are asked for; where none are named the well-known ones that the model has."""
    if cfg.entry_points is not None:
        return cfg.entry_points
    return tuple(name for name in model.methods if name in WELL_KNOWN)


def through(cfg: Config) -> Literal["units", "wrapper", "forward"] | None:
    """Return what a method has to pass through to run as the forward does; None: nothing stands in its way.

    ``units`` are gathered around it (torch ``register_fsdp_forward_method``); a ``wrapper`` runs it in its own forward;
    the model's ``forward`` has a patch around it that the method needs as well, such as autocast.
    """
    match cfg.engine:
        case FSDP2():
            return "units"
        case FSDP1() | DeepSpeed():
            return "wrapper"
        case DDP() if cfg.intent is Intent.TRAINING:
            return "wrapper"
        case _:
            return None if cfg.precision is None else "forward"
