"""The plan: ordered steps with their reasons, what they lead to, and what they were made from."""

from __future__ import annotations

from math import prod
from typing import Any

from attrs import field, frozen

from prepkit.config import Config
from prepkit.config.engines import SAME_DATA
from prepkit.facts import Facts
from prepkit.findings import Finding
from prepkit.findings.text import harmless
from prepkit.plan.layout import ParamLayout as ParamLayout
from prepkit.plan.summary import Owners as Owners
from prepkit.plan.summary import Planned as Planned
from prepkit.plan.summary import RunSettings as RunSettings
from prepkit.plan.summary import about, about_lines, finding_lines, origin_lines, step_lines, title
from prepkit.plan.summary import because as because
from prepkit.steps import Axis


@frozen(kw_only=True)
class Provenance:
    """What the plan was made from: digests that a file or another rank can be held against, and versions."""

    prepkit: str
    """Version of prepkit."""
    config: str
    """Digest of the config."""
    facts: str
    """Digest of the facts."""
    assumed: tuple[str, ...]
    """Environment facts that were declared, not seen."""


@frozen(kw_only=True)
class Plan:
    """An immutable plan. The same value on every rank: nothing in it mentions a rank."""

    config: Config
    facts: Facts
    mesh: tuple[Axis, ...]
    """Axes of the device mesh, slowest first; empty for one process."""
    steps: tuple[Planned, ...]
    layout: tuple[ParamLayout, ...]
    """What each parameter becomes, in the order of the facts."""
    owners: Owners
    run: RunSettings
    provenance: Provenance
    warnings: tuple[Finding, ...] = ()
    overridden: tuple[Finding, ...] = ()
    """Errors that ``config.overrides`` accepted."""
    target: Any = field(default=None, eq=False, repr=False)
    """The live objects that the plan was built from; in no digest, no file and no comparison."""

    @property
    def world_size(self) -> int:
        """Number of ranks that the plan is for."""
        return self.facts.env.world_size

    @property
    def data_parallel_size(self) -> int:
        """Number of parts that the data is divided into: ranks that differ only on the tensor axis read the same."""
        return prod(axis.size for axis in self.mesh if axis.name not in SAME_DATA)

    def __str__(self) -> str:
        """Return what it is for, its steps with their reasons, and what to mind; ``pk.show`` has the whole page."""
        provenance = self.provenance
        sections = (
            (
                title(self.config, self.facts),
                *about_lines(about(self.config, self.facts, self.mesh, self.owners, provenance.assumed)),
            ),
            tuple(origin_lines(self.config)),
            tuple(step_lines(self.steps)),
            tuple(finding_lines("warnings", self.warnings)),
            tuple(finding_lines("overridden (accepted in config.overrides)", self.overridden)),
        )
        return harmless("\n\n".join("\n".join(lines) for lines in sections if lines))
