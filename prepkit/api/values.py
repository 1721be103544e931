"""One family of verbs for plans and attestations: save, load, show, diff."""

from __future__ import annotations

import sys
from typing import Any, TextIO, TypeVar

from prepkit.auditing.outcome import Audit
from prepkit.codec import files
from prepkit.codec.diff import Change
from prepkit.codec.diff import diff as value_diff
from prepkit.findings import Finding
from prepkit.findings.text import harmless
from prepkit.plan import Plan
from prepkit.plan.attestation import Attestation

T = TypeVar("T", Plan, Attestation)


def save(value: Plan | Attestation, path: str) -> None:
    """Write a plan or an attestation into a file, whole or not at all.

    Raises ``OSError`` where the folder cannot be written, and ``TypeError`` for anything else.

    >>> from prepkit.config import DDP, Config
    >>> from prepkit.api import build_plan
    >>> from prepkit.testing.tiny import tiny_facts
    >>> plan = build_plan(Config(engine=DDP()), tiny_facts(world=4))
    >>> save(plan, f"{folder}/plan.json")
    >>> load(f"{folder}/plan.json") == plan
    True
    >>> save(plan.facts, f"{folder}/facts.json")
    Traceback (most recent call last):
    TypeError: Facts has no file of its own; give a plan or an attestation
    """
    files.save(value, path)


def load(path: str) -> Any:
    """Read a plan or an attestation, whichever the file says it holds.

    Raises ``PlanRejected`` with the place for a damaged, foreign, newer or edited file.

    >>> from prepkit.findings import PlanRejected
    >>> try:
    ...     load(f"{folder}/absent.json")
    ... except PlanRejected as refused:
    ...     print(refused.findings[0].rule, "-", refused.findings[0].fix)
    codec.unreadable - give the path of a plan file
    """
    return files.load(path)


def show(
    value: Plan | Attestation | Audit | tuple[Finding, ...] | tuple[Change, ...],
    *,
    file: TextIO | None = None,
    sources: bool = False,
) -> None:
    """Print the whole page of a plan: steps, layout, tree, memory, traffic; or another of the values named.

    ``file`` None: to standard output. ``sources`` adds to each step of a plan the behaviour rows that it answers.
    Raises ``TypeError`` for anything else.

    >>> from prepkit.config import Config, Single
    >>> from prepkit.api import check
    >>> from prepkit.testing.tiny import tiny_facts
    >>> show(check(Config(engine=Single()), tiny_facts(world=4)))
    error mesh.single-many-ranks at env.world_size: 4 processes run, and Single() would train a copy in each ...
      fix: Write engine=DDP() or engine=FSDP2(), or start one process.
    1 error
    >>> show(42)
    Traceback (most recent call last):
    TypeError: int cannot be shown; give a plan, an attestation, an audit, findings, or the changes of pk.diff
    """
    from prepkit.render.text import text_of

    text = str(value) if isinstance(value, Audit) else text_of(value, sources=sources)
    (file or sys.stdout).write(f"{harmless(text)}\n")


def diff(a: T, b: T) -> tuple[Change, ...]:
    """List the changes from plan ``a`` to plan ``b``, or from attestation to attestation; empty when they are equal.

    Raises ``TypeError`` for a plan and an attestation.

    >>> from prepkit.config import FSDP2, Config
    >>> from prepkit.api import build_plan
    >>> from prepkit.testing.tiny import tiny_facts
    >>> a, b = (build_plan(Config(engine=FSDP2(reshard_after_forward=x)), tiny_facts(world=4)) for x in (True, False))
    >>> diff(a, a)
    ()
    >>> print(diff(a, b)[0])
    config.engine.reshard_after_forward: True -> False
    """
    if type(a) is not type(b):
        raise TypeError(f"{type(a).__name__} and {type(b).__name__} cannot be compared; give two of a kind")
    if not isinstance(a, Plan | Attestation):
        raise TypeError(f"{type(a).__name__} has no difference to show; give two plans, or two attestations")
    return value_diff(a, b)
