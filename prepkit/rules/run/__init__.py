"""What is wrong with a prepared model: rules over what apply, or something else, has made of it."""

from __future__ import annotations

from prepkit.rules.rule import Rule
from prepkit.rules.run import (
    applied,
    averaging,
    beside,
    drift,
    gradients,
    loaders,
    modules,
    numbers,
    owners,
    ranks,
    who_steps,
    wrappers,
)

AUDIT_RULES: tuple[Rule, ...] = (
    *applied.RULES,
    *who_steps.RULES,
    *modules.RULES,
    *numbers.RULES,
    *wrappers.RULES,
    *averaging.RULES,
    *gradients.RULES,
    *ranks.RULES,
    *loaders.RULES,
    *owners.RULES,
    *beside.RULES,
    *drift.RULES,
    applied.STEPS,
)
"""Every rule about prepared objects in reporting order: a plan, who steps, model, ranks, data, changes, steps."""
