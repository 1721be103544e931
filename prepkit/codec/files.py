"""Files that prepkit wrote, told apart by what they say they are: plans, and attestations sealed like plans."""

from __future__ import annotations

import json
import os
from typing import Any

from prepkit.codec import from_data, plan_from_text, plan_to_text, read_text, to_data, write_text
from prepkit.codec.text import canonical, digest_text, inside, parse, readable, refusal, shown
from prepkit.findings import PlanRejected
from prepkit.plan import Plan
from prepkit.plan.attestation import Attestation
from prepkit.version import VERSION

FORMAT = 1
"""Format number of an attestation's file, like ``codec.FORMAT`` for plans."""

KIND = "prepkit.attestation"
"""Kind that the file names."""


def to_text(value: Plan | Attestation) -> str:
    """Write the text of its file. Raises ``TypeError`` for what is neither a plan nor an attestation."""
    if isinstance(value, Attestation):
        return attestation_to_text(value)
    if isinstance(value, Plan):
        return plan_to_text(value)
    raise TypeError(f"{type(value).__name__} has no file of its own; give a plan or an attestation")


def save(value: Plan | Attestation, path: str | os.PathLike[str]) -> None:
    """Write the file, whole or not at all. Raises ``OSError`` where the folder cannot be written."""
    _check_path("pk.save", path)
    write_text(to_text(value), path)


def load(path: str | os.PathLike[str]) -> Plan | Attestation:
    """Read a plan or an attestation. Anything else is refused as a plan. The file is read once."""
    _check_path("pk.load", path)
    text, where = read_text(path), f"{path}:$"
    return attestation_from_text(text, where) if _attests(text) else plan_from_text(text, where)


def _check_path(call: str, path: object) -> None:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f'{call}: {path!r:.60} is no path; give the path of a file, such as "plan.json"')


def _attests(text: str) -> bool:
    """Tell a text that says it is an attestation."""
    if KIND not in text:  # a large plan is not parsed for this
        return False
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and data.get("kind") == KIND


# --- attestations ---


def attestation_to_text(attestation: Attestation) -> str:
    """Write the text of an attestation file: kind, format number, digest, and the attestation."""
    data = to_data(attestation)
    seal = digest_text(canonical(data))
    return readable({"kind": KIND, "format": FORMAT, "digest": seal, "attestation": data}) + "\n"


def attestation_from_text(text: str, where: str = "$") -> Attestation:
    """Read an attestation from the text of its file. Raises ``PlanRejected`` as ``codec.plan_from_text`` does."""
    data = _checked_header(parse(text, where), where)
    attestation = from_data(data["attestation"], Attestation, inside(where, "attestation"))
    if data["digest"] != (now := digest_text(canonical(to_data(attestation)))):
        what = f"changed after prepkit wrote it: its digest is {now}, the file says {shown(data['digest'])}"
        raise PlanRejected((refusal("edited", inside(where, "digest"), what, "restore the file"),))
    return attestation


def _checked_header(data: Any, where: str) -> dict[str, Any]:
    if not isinstance(data, dict) or data.get("kind") != KIND:
        what = f"not an attestation: {shown(data)} does not have the kind {KIND!r}"
        raise PlanRejected((refusal("foreign", where, what, "give a file that pk.save(attestation, path) wrote"),))
    number = data.get("format")
    if type(number) is not int or number != FORMAT:
        what = f"format {shown(number)}, but prepkit {VERSION} reads format {FORMAT}"
        raise PlanRejected((refusal("other-format", inside(where, "format"), what, "use the prepkit that wrote it"),))
    keys = {"kind", "format", "digest", "attestation"}
    differing = sorted(data.keys() ^ keys)
    if differing:
        problems = ((key, "is missing" if key in keys else "is none of an attestation's keys") for key in differing)
        raise PlanRejected(
            tuple(
                refusal("wrong-keys", inside(where, key), f"{shown(key)} {text}", "restore the file")
                for key, text in problems
            )
        )
    return data
