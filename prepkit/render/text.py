"""Values of prepkit as text for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from prepkit.codec.diff import Set, Splice
from prepkit.findings import Finding, Severity
from prepkit.findings.text import aligned, count
from prepkit.plan import Plan
from prepkit.plan.attestation import Attestation
from prepkit.render.changes import diff_text
from prepkit.render.plan import plan_text
from prepkit.rules.rule import Moment, Rule

# --- findings --------------------------------------------------------------------------------------------------------


def findings_text(findings: tuple[Finding, ...], line: Callable[[Finding], str] = str) -> str:
    """List every finding, and their number at the end."""
    if not findings:
        return "no findings"
    counted = Counter(finding.severity for finding in findings)
    summary = ", ".join(count(counted[severity], severity.value) for severity in Severity if counted[severity])
    return "\n".join((*map(line, findings), summary))


NOTHING_GOES_ON = "nothing can go on unless it holds"
"""The reason why a rule cannot be overridden whose row gives no other."""

# --- rules -----------------------------------------------------------------------------------------------------------


def rules_text(rules: tuple[Rule, ...]) -> str:
    """List rules, a line each: id, severity, and what holds where there is no finding."""
    return "\n".join(aligned(tuple((rule.id, rule.severity.value, rule.summary) for rule in rules)))


def rule_text(rule: Rule, example: str = "") -> str:
    """Describe one rule.

    ``example`` is a finding of it, or a line that tells how to see one.
    """
    rows = (
        ("holds", rule.summary),
        ("fix", rule.fix),
        *_rows(rule),
        ("example", example.replace("\n", "\n" + " " * 12)),
    )
    return "\n".join((f"{rule.severity.value} {rule.id}", *aligned(tuple(row for row in rows if row[1]), indent=2)))


def _rows(rule: Rule) -> tuple[tuple[str, str], ...]:
    asked = "; ".join(moment.value for moment in rule.at)
    override = f"yes: overrides = [{rule.id!r}]" if rule.overridable else f"no: {rule.stops or NOTHING_GOES_ON}"
    repair = "yes: Rule.repair gives the mended config" if rule.repair else "no: config alone cannot give it"
    return (
        ("asked", asked if rule.at not in ((Moment.PLAN,), (Moment.CALL,)) else ""),
        ("needs", "; ".join(need.value for need in rule.needs)),
        ("costs", rule.cost),
        ("milder", f"a warning {rule.milder}" if rule.milder else ""),
        ("repair", repair if Moment.PLAN in rule.at else ""),
        ("override", override),
        ("source", ", ".join(rule.source)),
        ("met in", rule.told_by),
    )


# --- anything --------------------------------------------------------------------------------------------------------


def text_of(value: Any, *, sources: bool = False) -> str:
    """A plan on its whole page, an attestation, the findings of ``pk.check``, or the changes of ``pk.diff``.

    ``sources`` adds to each step of a plan the behaviour rows that it answers.
    Raises ``TypeError`` for anything else.
    """
    match value:
        case Plan():
            return plan_text(value, sources=sources)
        case Attestation():
            return str(value)
        case ():
            return "nothing: no findings, no differences"
        case (Finding(), *_):
            return findings_text(value)
        case (Set() | Splice(), *_):
            return diff_text(value)
        case _:
            kind = type(value).__name__
            raise TypeError(
                f"{kind} cannot be shown; give a plan, an attestation, an audit, findings, or the changes of pk.diff"
            )
