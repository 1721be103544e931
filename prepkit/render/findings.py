"""Findings as text."""

from __future__ import annotations

from collections import Counter

from prepkit.findings import Finding, Severity
from prepkit.findings.text import count


def findings_text(findings: tuple[Finding, ...]) -> str:
    """Every finding, and their number at the end."""
    if not findings:
        return "no findings"
    counted = Counter(finding.severity for finding in findings)
    summary = ", ".join(count(counted[severity], severity.value) for severity in Severity if counted[severity])
    return "\n".join((*map(str, findings), summary))
