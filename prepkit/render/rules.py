"""Rules as text."""

from __future__ import annotations

from prepkit.findings.text import aligned
from prepkit.rules.rule import Rule


def rules_text(rules: tuple[Rule, ...]) -> str:
    """One line per rule: id, severity, and what holds when it is silent."""
    return "\n".join(aligned(tuple((rule.id, rule.severity.value, rule.summary) for rule in rules)))


def rule_text(rule: Rule, example: str = "") -> str:
    """All that a rule says of itself; ``example`` is a finding of it, or a line that says how to see one."""
    override = f"yes: overrides = [{rule.id!r}]" if rule.overridable else "no: no plan exists unless it holds"
    rows = (
        ("holds", rule.summary),
        ("fix", rule.fix),
        ("repair", "yes: Rule.repair gives the mended config" if rule.repair else "no: config alone cannot give it"),
        ("override", override),
        ("source", ", ".join(rule.source)),
        ("example", example.replace("\n", "\n" + " " * 12)),
    )
    return "\n".join((f"{rule.severity.value} {rule.id}", *aligned(tuple(row for row in rows if row[1]), indent=2)))
