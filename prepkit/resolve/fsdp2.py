"""What FSDP2 makes of a model, or finds made where the model arrives sharded. Sums that rules and planner share."""

from __future__ import annotations

from prepkit.facts import ModelFacts
from prepkit.resolve.modules import packed_params


def standing_units(model: ModelFacts) -> tuple[str, ...]:
    """Paths of the units below the root that a model arrives with, children before parents."""
    return tuple(unit.path for unit in model.units if unit.path)


def unsharded_params(model: ModelFacts) -> tuple[str, ...]:
    """Frozen parameters that every rank holds whole: those that are packed, or that came so in a sharded model."""
    if model.units:
        return tuple(param.name for param in model.params if param.cls != "DTensor" and not param.requires_grad)
    return packed_params(model)
