"""What is wrong with a model that something else has prepared: rules over what stands there before its first step."""

from __future__ import annotations

from prepkit.rules.rule import Rule
from prepkit.rules.run import (
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
)
"""Every audit rule in reporting order: who steps, model, numbers, wrappers, ranks, data, two owners, later changes."""
