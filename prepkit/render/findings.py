"""Findings as text."""

from __future__ import annotations

from prepkit.findings import Finding, errors
from prepkit.findings.text import count


def findings_text(findings: tuple[Finding, ...]) -> str:
    """Every finding, and their number at the end."""
    if not findings:
        return "no findings"
    refusing = len(errors(findings))
    counts = ((refusing, "error"), (len(findings) - refusing, "warning"))
    summary = ", ".join(count(number, noun) for number, noun in counts if number)
    return "\n".join((*map(str, findings), summary))
