"""Asks the rules that are due at a moment: refuses errors, and reports each warning once, on rank 0."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from attrs import define, field

from prepkit import rules
from prepkit.findings import Finding, FindingWarning, RunRefused, Severity
from prepkit.ranks.launcher import is_main
from prepkit.rules.rule import Moment, findings_of

HOME = str(Path(__file__).parent)
"""The folder of prepkit's own frames: a warning points at the line that called it."""

found = rules.found
"""The finding of a row by its id, for whoever has met what it forbids and knows nothing else of the law book."""


@define(kw_only=True, eq=False, repr=False)
class Court:
    """What one run has been accused of: which errors its config accepts, and which warnings were reported."""

    accepted: Collection[str] = ()
    """Ids of rules whose errors pass, as in ``config.overrides``; a rule that is not overridable refuses anyway."""
    overridden: list[str] = field(factory=list, init=False)
    """Ids of the errors that were accepted, each once, for the attestation."""
    warned: dict[tuple[str, str], Finding] = field(factory=dict, init=False)
    """Rule and place of each warning, for the attestation: rank 0 has shown it once."""

    def also_accepting(self, ids: Collection[str]) -> Court:
        """A court for one call that accepts these errors too, and adds them to those that this one has accepted."""
        other = Court(accepted={*self.accepted, *ids})
        other.overridden, other.warned = self.overridden, self.warned
        return other

    def ask(self, moment: Moment, subject: Any) -> None:
        """Raises ``RunRefused`` with every error of the rules due at this moment; reports their warnings.

        Not collective: give it what all ranks have seen alike where all of them must refuse together.
        """
        if found := findings_of(rules.due(moment), subject):
            self.hear(found)

    def hear(self, findings: Iterable[Finding]) -> None:
        """The same for findings that were made elsewhere."""
        if refused := self.judged(findings):
            raise RunRefused(refused)

    def judged(self, findings: Iterable[Finding]) -> tuple[Finding, ...]:
        """The errors that nobody has accepted; takes note of those that were and of warnings, and reports these."""
        refused = []
        for finding in findings:
            match finding.severity:
                case Severity.ERROR if finding.rule not in self.accepted or not _overridable(finding.rule):
                    refused.append(finding)
                case Severity.ERROR:
                    if finding.rule not in self.overridden:
                        self.overridden.append(finding.rule)
                case Severity.WARNING:
                    self._report(finding)
                case Severity.NOTE:
                    pass
        return tuple(refused)

    def _report(self, finding: Finding) -> None:
        if (finding.rule, finding.where) not in self.warned:
            self.warned[finding.rule, finding.where] = finding
            report((finding,))


def refused(rule: str, where: str, what: str, fix: str = "") -> RunRefused:
    """The refusal to raise by who meets what a row forbids, by the row's id."""
    return RunRefused((rules.found(rule, where, what, fix),))


def report(findings: Iterable[Finding], *, every_rank: bool = False) -> None:
    """Warns of each finding, at the line of the user's that led to it.

    On rank 0, unless ``every_rank``: for what a rank sees by itself, and the others may not.
    """
    if every_rank or is_main():
        for finding in findings:
            warnings.warn(FindingWarning(finding), stacklevel=_depth())


def _overridable(rule: str) -> bool:
    known = rules.by_id().get(rule)
    return known is not None and known.overridable


def _depth() -> int:
    """The ``stacklevel``, as seen from the caller, of the line that called prepkit, or torch that has called a hook."""
    frame: FrameType | None = sys._getframe(1)
    depth, found, inside = 1, 1, True
    while frame is not None:
        ours = frame.f_code.co_filename.startswith(HOME)
        inside = ours or (inside and str(frame.f_globals.get("__name__")).partition(".")[0] == "torch")
        found = depth + 1 if inside else found
        frame, depth = frame.f_back, depth + 1
    return found
