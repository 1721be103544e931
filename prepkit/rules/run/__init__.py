"""What is wrong with a prepared model: rules over what apply, or something else, has made of it."""

from __future__ import annotations

from prepkit.rules.rule import Rule
from prepkit.rules.run import (
    applied,
    averaging,
    beside,
    drift,
    gradients,
    inside,
    loaders,
    modules,
    numbers,
    owners,
    ranks,
    unread,
    who_steps,
    wrappers,
)

AUDIT_RULES: tuple[Rule, ...] = (
    *applied.RULES,
    *who_steps.RULES,
    *unread.RULES,
    *modules.RULES,
    *inside.RULES,
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
