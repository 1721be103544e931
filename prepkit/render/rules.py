"""Rules, those of audits, and refusals of files and calls, as text."""

from __future__ import annotations

from typing import Protocol

from prepkit.findings import Severity
from prepkit.findings.refusal import Refusal
from prepkit.findings.text import aligned
from prepkit.rules.rule import Rule


class Described(Protocol):
    """What a rule of an audit says of itself; the rules themselves stand above what only shows."""

    @property
    def id(self) -> str:
        """As a rule has it."""
        ...

    @property
    def severity(self) -> Severity:
        """As a rule has it."""
        ...

    @property
    def summary(self) -> str:
        """As a rule has it."""
        ...

    @property
    def fix(self) -> str:
        """As a rule has it."""
        ...

    @property
    def source(self) -> tuple[str, ...]:
        """As a rule has it."""
        ...


def rules_text(rules: tuple[Rule | Described | Refusal, ...]) -> str:
    """One line each: id, severity, and what holds when it is silent."""
    return "\n".join(aligned(tuple((rule.id, rule.severity.value, rule.summary) for rule in rules)))


def rule_text(rule: Rule | Described | Refusal, example: str = "") -> str:
    """All that one says of itself; ``example`` is a finding of it, or a line that says how to see one."""
    rows = (
        ("holds", rule.summary),
        ("fix", rule.fix),
        *_rows(rule),
        ("example", example.replace("\n", "\n" + " " * 12)),
    )
    return "\n".join((f"{rule.severity.value} {rule.id}", *aligned(tuple(row for row in rows if row[1]), indent=2)))


def _rows(rule: Rule | Described | Refusal) -> tuple[tuple[str, str], ...]:
    match rule:
        case Rule():
            return _rule_rows(rule)
        case Refusal():
            return _refusal_rows(rule)
        case _:
            return (("asked", "by pk.audit and prepkit audit"), ("source", ", ".join(rule.source)))


def _rule_rows(rule: Rule) -> tuple[tuple[str, str], ...]:
    override = f"yes: overrides = [{rule.id!r}]" if rule.overridable else "no: no plan exists unless it holds"
    return (
        ("repair", "yes: Rule.repair gives the mended config" if rule.repair else "no: config alone cannot give it"),
        ("override", override),
        ("source", ", ".join(rule.source)),
    )


def _refusal_rows(refusal: Refusal) -> tuple[tuple[str, str], ...]:
    return (
        ("override", "no: it is about a file, a call or a model, not about a config"),
        ("met in", refusal.raised_by),
    )
