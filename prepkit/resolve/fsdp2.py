"""What FSDP2 makes of a model, or finds made where the model arrives sharded. Sums that rules and planner share."""

from __future__ import annotations

from prepkit.config import FSDP2, Config
from prepkit.facts import ModelFacts
from prepkit.resolve.modules import kept_whole, select


def arrives_sharded(cfg: Config, model: ModelFacts) -> bool:
    """Whether ``fully_shard`` has made units of the model before, so that FSDP2 only verifies them (M2-1)."""
    return isinstance(cfg.engine, FSDP2) and bool(model.units)


def unit_paths(engine: FSDP2, model: ModelFacts) -> tuple[str, ...]:
    """Paths of the units below the root, children before parents: those that are there, else the selection."""
    if model.units:
        return tuple(unit.path for unit in model.units if unit.path)
    return select(engine.wrap, model)


def left_whole(model: ModelFacts) -> tuple[str, ...]:
    """Frozen parameters that every rank holds whole: those that are packed, or that came so in a sharded model."""
    if model.units:
        return tuple(param.name for param in model.params if param.cls != "DTensor" and not param.requires_grad)
    return kept_whole(model)
