"""The ``Rule`` value."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attrs import frozen

from prepkit.config import Config
from prepkit.facts import Facts
from prepkit.findings import Severity


@frozen
class Hit:
    """One place where a rule does not hold."""

    where: str
    """Path into config or facts, such as ``config.mesh.shard``."""
    what: str
    """What is wrong there, with the values that show it."""
    fix: str = ""
    """What to type; empty: the rule's own ``fix`` says it."""


@frozen(kw_only=True)
class Rule:
    """A value: what must hold between config and facts, and what to do when it does not."""

    id: str
    """``subject.what-is-wrong``; never reused."""
    summary: str
    """What holds when the rule is silent."""
    check: Callable[[Config, Facts], Iterator[Hit]]
    """Yields one hit per place; reads only."""
    fix: str
    """The imperative sentence a user follows."""
    severity: Severity = Severity.ERROR
    overridable: bool = True
    """False where no plan exists unless the rule holds, such as a mesh that does not multiply to the world size."""
    source: tuple[str, ...] = ()
    """Behaviour rows (``DM-1``), pains (``pain 5``) or torch functions that the rule comes from."""
    repair: Callable[[Config, Facts], Config] | None = None
    """The fix as a function, where config alone can give it: it silences this rule and adds no other error."""
