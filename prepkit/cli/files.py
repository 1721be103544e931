"""Files that prepkit wrote, told apart by what they say they are: plans and attestations."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from prepkit import codec
from prepkit.attestation import Attestation
from prepkit.changes import Change, diff
from prepkit.codec import attestation as codec_attestation
from prepkit.findings import PlanRejected
from prepkit.plan import Plan
from prepkit.render.changes import diff_text


def load(files: tuple[str, ...]) -> tuple[Plan | Attestation | PlanRejected, ...]:
    """What each file holds, or every reason why it cannot be read."""
    return tuple(map(_load, files))


def text(value: Plan | Attestation) -> str:
    """The text of its file."""
    if isinstance(value, Attestation):
        return codec_attestation.attestation_to_text(value)
    return codec.plan_to_text(value)


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
        return codec_attestation.load_attestation(file) if _attests(file) else codec.load_plan(file)
    except PlanRejected as refused:
        return refused


def _attests(file: str) -> bool:
    """Whether the file says that it is an attestation; what is neither is refused as a plan."""
    try:
        data = json.loads(codec.read_text(file))
    except (ValueError, RecursionError, PlanRejected):
        return False
    return isinstance(data, dict) and data.get("kind") == codec_attestation.KIND
