"""What was looked at after a plan was applied, and under which circumstances: data that is kept beside the plan."""

from __future__ import annotations

from attrs import frozen

from prepkit.facts import Env
from prepkit.plan import Provenance
from prepkit.plan.drift import Drift


@frozen(kw_only=True)
class Check:
    """One property of one object that was looked at after apply, and whether it is as planned."""

    subject: str
    """A step kind, the name of a parameter, ``optimizer`` or ``model``."""
    what: str
    """Which property, such as ``placements``."""
    holds: bool
    detail: str = ""
    """Where it does not hold: the planned and the found value."""

    def __str__(self) -> str:
        return f"{self.subject}: {self.what}" + ("" if self.holds else f": {self.detail}")


@frozen(kw_only=True)
class Attestation:
    """Everything that was looked at after apply on one rank, of which plan, and where. No clock: runs can be equal."""

    plan: str = ""
    """Digest of the plan."""
    made: Provenance | None = None
    """What the plan was made from."""
    overridden: tuple[str, ...] = ()
    """Ids of the rules whose errors the plan accepted, once per finding."""
    env: Env | None = None
    """Versions, devices and environment variables at apply time. None: not looked at."""
    drift: tuple[Drift, ...] = ()
    """Facts that were not as planned and do no harm, such as another library version."""
    rank: int = 0
    checks: tuple[Check, ...] = ()
    fingerprints: tuple[tuple[str, str], ...] = ()
    """Name and fingerprint of every parameter as it stood after apply, in 16 hex digits; empty unless asked for."""

    @property
    def failed(self) -> tuple[Check, ...]:
        """Checks that do not hold; empty when what stands there is what was planned."""
        return tuple(check for check in self.checks if not check.holds)

    def __str__(self) -> str:
        failed = self.failed
        lines = (
            f"{len(failed)} of {len(self.checks)} checks do not hold:" if failed else f"{len(self.checks)} checks hold",
            *(f"  {check}" for check in failed),
            *(("drift since the plan was made:",) if self.drift else ()),
            *(f"  {entry}" for entry in self.drift),
        )
        return "\n".join(lines)


def same(subject: str, what: str, planned: object, found: object) -> Check:
    """The check that what stands there equals what was planned; both are shown where they differ."""
    if planned == found:
        return Check(subject=subject, what=what, holds=True)
    return Check(subject=subject, what=what, holds=False, detail=f"planned {planned}, found {found}")


def each(subject: str, what: str, bad: list[str]) -> Check:
    """One check over many objects; ``bad`` says which of them do not hold."""
    shown = "; ".join(bad[:5]) + (f"; and {len(bad) - 5} more" if len(bad) > 5 else "")
    return Check(subject=subject, what=what, holds=not bad, detail=shown)
