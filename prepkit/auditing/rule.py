"""The ``AuditRule`` value: as a ``Rule``, over the facts of a prepared model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attrs import frozen

from prepkit.facts.prepared import PreparedFacts
from prepkit.findings import Severity
from prepkit.rules.rule import Hit

Look = Callable[[PreparedFacts], Iterator[Hit]]
"""What an audit rule does: reads the facts, and yields one hit per place."""


@frozen(kw_only=True)
class AuditRule:
    """A value: what must hold of a prepared model before its first step, and what to do when it does not."""

    id: str
    """``audit.what-is-wrong``; never reused."""
    summary: str
    """What holds when the rule is silent."""
    look: Look
    fix: str
    """The imperative sentence a user follows."""
    severity: Severity = Severity.ERROR
    source: tuple[str, ...] = ()
    """Behaviour rows, pains or torch functions that the rule comes from."""
