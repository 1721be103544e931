"""One kind of finding that no rule about config and facts makes."""

from __future__ import annotations

from attrs import frozen

from prepkit.findings import Severity


@frozen(kw_only=True)
class Refusal:
    """Why a file, a call or a model is refused. It cannot be overridden: without it there is nothing to go on with."""

    id: str
    """``subject.what-is-wrong``, as findings carry it; never reused."""
    summary: str
    """What holds when there is no such finding."""
    fix: str
    """What helps in general; the finding itself says it for its case."""
    raised_by: str
    """The call or the module that makes the finding."""
    severity: Severity = Severity.ERROR
