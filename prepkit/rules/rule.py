"""The ``Rule`` value."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attrs import frozen

from prepkit.config import Config
from prepkit.facts import Facts
from prepkit.findings import Severity
from prepkit.resolve.resolved import Resolved


@frozen
class Hit:
    """One place where a rule does not hold."""

    where: str
    """Path into config or facts, such as ``config.mesh.shard``."""
    what: str
    """What is wrong there, with the values that show it."""
    fix: str = ""
    """What to type; empty: the rule's own ``fix`` says it."""


Check = Callable[[Resolved], Iterator[Hit]]
"""What a rule looks at: ``resolved.cfg``, ``resolved.facts``, and what follows from the two, such as its ``mesh``."""
Repair = Callable[[Config, Facts], Config]
"""The config mended. Repairs are chained, so each takes the config that the one before has left."""


@frozen(kw_only=True)
class Rule:
    """A value: what must hold between config and facts, and what to do when it does not."""

    id: str
    """``subject.what-is-wrong``; never reused."""
    summary: str
    """What holds when the rule is silent."""
    check: Check
    """Yields one hit per place; reads only."""
    fix: str
    """The imperative sentence a user follows."""
    severity: Severity = Severity.ERROR
    overridable: bool = True
    """False where no plan exists unless the rule holds, such as a mesh that does not multiply to the world size."""
    source: tuple[str, ...] = ()
    """Behaviour rows (``DM-1``), pains (``pain 5``) or torch functions that the rule comes from."""
    repair: Repair | None = None
    """The fix as a function, where config alone can give it: it silences this rule and adds no other error."""
