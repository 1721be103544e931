"""Runs a program up to its first step on this rank, and audits it: for tests and for ``tests.tools.audit``."""

from __future__ import annotations

from collections.abc import Callable

import prepkit as pk
from prepkit.auditing.audit import audit as look
from prepkit.auditing.outcome import Audit
from tests.audit.case import Case
from tests.audit.clean import CLEAN
from tests.audit.errors import ERRORS
from tests.support.launch import launched

Outcome = tuple[float, tuple[tuple[str, str, str], ...]]
"""Seconds that the audit took, and rule, severity and text of each finding."""


def program(name: str) -> Callable[[int, int], Case]:
    return {**{one.id: one.make for one in ERRORS}, **{one.id: one.make for one in CLEAN}}[name]


def audited(rank: int, world: int, name: str) -> Outcome:
    with launched(rank, world):
        case = program(name)(rank, world)
        given = (case.model, case.optimizer, case.scheduler, case.loaders)
        audit: Audit = look(*given, at_step=True) if case.at_step else (case.audit or pk.audit)(*given)
    audit.explain()  # of any program, right or wrong: it raises nothing
    return audit.seconds, tuple((one.rule, one.severity.value, str(one)) for one in audit.findings)
