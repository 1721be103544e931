"""Files that prepkit wrote, told apart by what they say they are: plans and attestations."""

from __future__ import annotations

from collections.abc import Sequence

import click

from prepkit.codec import files as codec_files
from prepkit.codec.diff import Change, diff
from prepkit.findings import PlanRejected
from prepkit.plan import Plan
from prepkit.plan.attestation import Attestation
from prepkit.render.changes import diff_text


def load(files: tuple[str, ...]) -> tuple[Plan | Attestation | PlanRejected, ...]:
    """What each file holds, or every reason why it cannot be read."""
    return tuple(map(_load, files))


def changes(old: Plan | Attestation, new: Plan | Attestation) -> tuple[Change, ...]:
    """What turns one into the other. Ends the command for a plan and an attestation, which cannot be compared."""
    if isinstance(old, Plan) and isinstance(new, Plan):
        return diff(old, new)
    if isinstance(old, Attestation) and isinstance(new, Attestation):
        return diff(old, new)
    raise click.UsageError("one is a plan, the other an attestation; compare two of a kind")


def told(value: Plan | Attestation, changes: Sequence[Change]) -> str:
    """The changes of such a value as text."""
    return "the attestations are equal" if isinstance(value, Attestation) and not changes else diff_text(changes)


def _load(file: str) -> Plan | Attestation | PlanRejected:
    try:
        return codec_files.load(file)
    except PlanRejected as refused:
        return refused
