"""What was looked at after a plan was applied, and under which circumstances: data that is kept beside the plan."""

from __future__ import annotations

from attrs import frozen

from prepkit.facts import Env
from prepkit.findings import Finding, Severity
from prepkit.plan import Provenance
from prepkit.plan.drift import Drift


@frozen(kw_only=True)
class Asked:
    """A rule of the law book that was asked of what stands there, and what it has found."""

    rule: str
    """Its id."""
    moment: str
    """When it was asked, in the words of ``prepkit.rules.Moment``: ``after apply``, ``before the first step``."""
    found: tuple[Finding, ...] = ()
    """Empty where it holds."""


@frozen(kw_only=True)
class Attestation:
    """Everything that was looked at after apply on one rank, of which plan, and where. No clock: runs can be equal."""

    plan: str = ""
    """Digest of the plan."""
    made: Provenance | None = None
    """What the plan was made from."""
    overridden: tuple[str, ...] = ()
    """Ids of the rules whose errors were accepted: those of the plan once per finding, later ones once."""
    env: Env | None = None
    """Versions, devices and environment variables at apply time. None: not looked at."""
    drift: tuple[Drift, ...] = ()
    """Facts that were not as planned and do no harm, such as another library version."""
    rank: int = 0
    asked: tuple[Asked, ...] = ()
    """Every rule that was asked, in reporting order."""
    warned: tuple[Finding, ...] = ()
    """Warnings of the plan, of apply, and of the run until now, whatever rank has shown them; each once."""
    fingerprints: tuple[tuple[str, str], ...] = ()
    """Name and fingerprint of every parameter as it stood after apply, in 16 hex digits; empty unless asked for."""

    @property
    def found(self) -> tuple[Finding, ...]:
        """Everything that was found, what is merely odd and what was accepted too."""
        return tuple(finding for asked in self.asked for finding in asked.found)

    @property
    def failed(self) -> tuple[Finding, ...]:
        """Errors that nobody has accepted; empty when what is there is what was planned."""
        return tuple(one for one in self.found if one.severity is Severity.ERROR and one.rule not in self.overridden)

    def __str__(self) -> str:
        failed = self.failed
        broken = len({finding.rule for finding in failed})
        lines = (
            f"{broken} of {len(self.asked)} rules do not hold:" if failed else f"{len(self.asked)} rules hold",
            *(f"  {finding.rule} at {finding.where}: {finding.what}" for finding in failed),
            *(f"  note {one.rule} at {one.where}: {one.what}" for one in self.found if one.severity is Severity.NOTE),
            *(("drift since the plan was made:",) if self.drift else ()),
            *(f"  {entry}" for entry in self.drift),
        )
        return "\n".join(lines)
