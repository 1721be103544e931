"""The attestation file: what was looked at after apply, sealed like a plan."""

from __future__ import annotations

from typing import Any

from prepkit.codec import from_data, to_data
from prepkit.codec.text import canonical, digest_text, inside, parse, readable, refusal, shown
from prepkit.findings import PlanRejected
from prepkit.plan.attestation import Attestation
from prepkit.version import VERSION

FORMAT = 1
"""Number of the file's format; as ``codec.FORMAT``."""

KIND = "prepkit.attestation"
"""What the file says it is."""


def attestation_to_text(attestation: Attestation) -> str:
    """The text of the attestation file: kind, format number, digest, and the attestation itself."""
    data = to_data(attestation)
    seal = digest_text(canonical(data))
    return readable({"kind": KIND, "format": FORMAT, "digest": seal, "attestation": data}) + "\n"


def attestation_from_text(text: str, where: str = "$") -> Attestation:
    """The attestation in the text of its file. Raises ``PlanRejected`` as ``codec.plan_from_text`` does."""
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
