"""What a check says, as a value."""

from __future__ import annotations

from enum import StrEnum

from attrs import field, frozen

from prepkit.findings.text import harmless, shorter


class Severity(StrEnum):
    """How much a finding weighs: an error refuses the plan, a warning is written into it, a note asks nothing."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@frozen(kw_only=True)
class Finding:
    """One thing that is wrong: which rule says so, where, what, and what to type instead."""

    rule: str
    """Id of the rule, for example ``wrap.class-not-found``."""
    severity: Severity
    where: str = field(converter=shorter)
    """Path of the object: ``config.engine.wrap``, ``model.layers.0.weight``, ``plan.json:$.steps[3].kind``."""
    what: str = field(converter=shorter)
    """What is wrong with the object, with the values that show it."""
    fix: str = field(converter=shorter)
    """What to type instead, in the imperative. Each of the three is cut where it would fill a screen."""
    origin: str = ""
    """Key, file, line and column that an imported setting was read from; empty where nothing was imported."""

    def __str__(self) -> str:
        origin = f" ({self.origin})" if self.origin else ""
        return harmless(f"{self.severity.value} {self.rule} at {self.where}{origin}: {self.what}\n  fix: {self.fix}")


def errors(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """The findings that refuse a plan, in their order."""
    return tuple(finding for finding in findings if finding.severity is Severity.ERROR)


class PlanRejected(Exception):
    """A plan was refused: at planning, at loading its file, or at applying it. ``findings`` holds every reason.

    Nothing live has been touched when it is raised.
    """

    def __init__(self, findings: tuple[Finding, ...], rest: object = None) -> None:
        self.findings = findings
        self.rest = rest
        """What was meant, as far as it can be read, so that the rules can be asked about it as well; None: nothing."""
        count = len(findings)
        super().__init__("\n".join((f"{count} finding{'s' if count != 1 else ''}:", *map(str, findings))))


class RunRefused(RuntimeError):
    """A prepared model was about to be trained, saved or resumed wrongly. ``findings`` holds every reason.

    Raised on every rank that would have gone wrong, before anything was changed by the call that is refused. Where
    steps had acted already, ``ApplyHalted`` and ``NotAsPlanned`` say what they have left.
    """

    def __init__(self, findings: tuple[Finding, ...], lately: tuple[str, ...] = ()) -> None:
        self.findings = findings
        self.lately = lately
        """The last lines of the loop's history, where it was a call of the loop."""
        shown = ("  before:", *(f"    {line}" for line in lately)) if lately else ()
        super().__init__("\n".join((*map(str, findings), *shown)))


class FindingWarning(UserWarning):
    """The one category of prepkit's warnings: ``warnings.simplefilter("error", FindingWarning)`` refuses them all."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        super().__init__(str(finding))
