"""Files that prepkit wrote, told apart by what they say they are: plans and attestations."""

from __future__ import annotations

import json
import os

from prepkit.codec import plan_from_text, plan_to_text, read_text, write_text
from prepkit.codec.attestation import KIND, attestation_from_text, attestation_to_text
from prepkit.plan import Plan
from prepkit.plan.attestation import Attestation


def to_text(value: Plan | Attestation) -> str:
    """The text of its file. Raises ``TypeError`` for what is neither a plan nor an attestation."""
    if isinstance(value, Attestation):
        return attestation_to_text(value)
    if isinstance(value, Plan):
        return plan_to_text(value)
    raise TypeError(f"{type(value).__name__} has no file of its own; give a plan or an attestation")


def save(value: Plan | Attestation, path: str | os.PathLike[str]) -> None:
    """Writes the file whole or not at all. Raises ``OSError`` where the folder cannot be written."""
    _check_path("pk.save", path)
    write_text(to_text(value), path)


def load(path: str | os.PathLike[str]) -> Plan | Attestation:
    """What the file holds; what says of itself that it is neither is refused as a plan. Reads the file once."""
    _check_path("pk.load", path)
    text, where = read_text(path), f"{path}:$"
    return attestation_from_text(text, where) if _attests(text) else plan_from_text(text, where)


def _check_path(call: str, path: object) -> None:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f'{call}: {path!r:.60} is no path; give the path of a file, such as "plan.json"')


def _attests(text: str) -> bool:
    """Whether the text says that it is an attestation."""
    if KIND not in text:  # a large plan is not parsed for this
        return False
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and data.get("kind") == KIND
