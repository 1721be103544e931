"""What is wrong with a prepared model: rules over what apply, or something else, has made of it."""

from __future__ import annotations

from prepkit.rules.rule import Rule
from prepkit.rules.run import (
    applied,
    averaging,
    beside,
    drift,
    drift_course,
    gradients,
    inside,
    loaders,
    modules,
    numbers,
    owners,
    ranks,
    unread,
    who_steps,
    window,
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
    *window.RULES,
    *beside.RULES,
    *drift.RULES,
    *drift_course.RULES,
    applied.STEPS,
)
"""Every rule about prepared objects in reporting order: a plan, who steps, model, ranks, data, changes, steps."""
