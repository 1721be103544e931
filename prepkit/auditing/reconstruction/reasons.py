"""Why what stands there is not what a config of prepkit asks for."""

from __future__ import annotations

from attrs import define, field

from prepkit.findings import Finding
from prepkit.rules import found


@define
class Reasons:
    """What has been found against a config, in the order in which it was met."""

    found: list[Finding] = field(factory=list)

    def add(self, where: str, what: str, fix: str) -> None:
        """Add a reason against a config."""
        self.found.append(found("audit.no-config", where, what, fix))

    def same(self, where: str, what: str, values: set[object] | frozenset[object]) -> None:
        """Add a reason where there are several values of a setting that a config has once."""
        if len(values) > 1:
            said = " and ".join(sorted(map(str, values)))
            self.add(where, f"{what} is not the same everywhere: {said}", "Prepare all of them alike.")
