"""What is wrong with a model that something else has prepared: rules over what stands there before its first step."""

from __future__ import annotations

from prepkit.auditing import averaging, drift, gradients, loaders, modules, numbers, owners, ranks, who_steps, wrappers
from prepkit.auditing.outcome import Audit
from prepkit.auditing.rule import AuditRule
from prepkit.facts.prepared import PreparedFacts
from prepkit.findings import Finding

__all__ = ["AUDIT_RULES", "Audit", "AuditRule", "findings_of"]

AUDIT_RULES: tuple[AuditRule, ...] = (
    *who_steps.RULES,
    *modules.RULES,
    *numbers.RULES,
    *wrappers.RULES,
    *averaging.RULES,
    *gradients.RULES,
    *ranks.RULES,
    *loaders.RULES,
    *owners.RULES,
    *drift.RULES,
)
"""Every audit rule in reporting order: who steps, model, numbers, wrappers, ranks, data, two owners, later changes."""


def findings_of(facts: PreparedFacts, rules: tuple[AuditRule, ...] = AUDIT_RULES) -> tuple[Finding, ...]:
    """Every finding in the order of the rules. Pure, and linear in the size of the model."""
    return tuple(
        Finding(rule=rule.id, severity=rule.severity, where=hit.where, what=hit.what, fix=hit.fix or rule.fix)
        for rule in rules
        for hit in rule.look(facts)
    )
