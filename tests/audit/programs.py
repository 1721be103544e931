"""Runs a program up to its first step on this rank, and audits it: for tests and for ``tests.tools.audit``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

import prepkit as pk
from prepkit.auditing.audit import audit as look
from prepkit.auditing.outcome import Audit
from tests.audit.case import Case
from tests.audit.clean import CLEAN
from tests.audit.errors import ERRORS

Outcome = tuple[float, tuple[tuple[str, str, str], ...]]
"""Seconds that the audit took, and rule, severity and text of each finding."""


@contextmanager
def launched(rank: int, world: int) -> Iterator[None]:
    """The variables that a launcher sets, for accelerate and DeepSpeed; afterwards all is as before."""
    before, off = dict(os.environ), torch._dynamo.config.disable
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": 29511}
    if torch.distributed.is_initialized():
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    try:
        yield
    finally:
        torch._dynamo.config.disable = off
        os.environ.clear()
        os.environ.update(before)
        state = sys.modules.get("accelerate.state")
        for kind in ("AcceleratorState", "GradientState", "PartialState") if state is not None else ():
            getattr(state, kind)._reset_state()


def program(name: str) -> Callable[[int, int], Case]:
    return {**{one.id: one.make for one in ERRORS}, **{one.id: one.make for one in CLEAN}}[name]


def audited(rank: int, world: int, name: str) -> Outcome:
    with launched(rank, world):
        case = program(name)(rank, world)
        given = (case.model, case.optimizer, case.scheduler, case.loaders)
        audit: Audit = look(*given, at_step=True) if case.at_step else (case.audit or pk.audit)(*given)
    audit.explain()  # of any program, right or wrong: it raises nothing
    return audit.seconds, tuple((one.rule, one.severity.value, str(one)) for one in audit.findings)
