"""A plan or an attestation as an in-toto Statement, which stock tools sign and verify: no cryptography is prepkit's."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

from prepkit.codec import plan_digest, to_data
from prepkit.plan import Plan
from prepkit.plan.attestation import Attestation
from prepkit.version import VERSION

TYPE = "https://in-toto.io/Statement/v1"
PREDICATE = "https://prepkit.dev/attestation/v1"
"""What the predicate is; an identifier, and no page."""
OF_PLAN = "https://prepkit.dev/plan/v1"
"""Likewise, of a plan that nobody has applied yet."""


def statement_text(value: Plan | Attestation) -> str:
    """The bytes that are signed: the same for the same value, on every machine."""
    data = statement(value) if isinstance(value, Attestation) else plan_statement(value)
    return json.dumps(data, indent=1) + "\n"


def plan_statement(plan: Plan) -> dict[str, Any]:
    """The Statement of a plan: itself, its config and its facts by their digests, and in short what somebody signs."""
    made = plan.provenance
    return {
        "_type": TYPE,
        "subject": _subjects({"plan": plan_digest(plan), "config": made.config, "facts": made.facts}),
        "predicateType": OF_PLAN,
        "predicate": {
            "prepkit": made.prepkit,
            "engine": plan.run.engine,
            "precision": plan.run.precision,
            "world_size": plan.world_size,
            "warnings": sorted({finding.rule for finding in plan.warnings}),
            "overridden": sorted({finding.rule for finding in plan.overridden}),
        },
    }


def _subjects(digests: dict[str, str]) -> list[dict[str, Any]]:
    said = {name: digest.removeprefix("sha256:") for name, digest in digests.items() if digest}
    return [{"name": name, "digest": {"sha256": digest}} for name, digest in said.items()]


def statement(attestation: Attestation) -> dict[str, Any]:
    """The Statement: plan, facts and weights by their digests, and what was asked of them, where and with what answer.

    The digest of ``weights`` is that of the names and fingerprints, in order; it is there where they were asked for.
    """
    made = attestation.made
    subjects = {
        "plan": attestation.plan,
        "config": made.config if made else "",
        "facts": made.facts if made else "",
        "weights": sha256(json.dumps(attestation.fingerprints).encode()).hexdigest()
        if attestation.fingerprints
        else "",
    }
    return {
        "_type": TYPE,
        "subject": _subjects(subjects),
        "predicateType": PREDICATE,
        "predicate": {
            "holds": not attestation.failed,
            "checks": [
                {"rule": one.rule, "moment": one.moment, "found": [to_data(found) for found in one.found]}
                for one in attestation.asked
            ],
            "environment": to_data(attestation.env),
            "versions": {"prepkit": VERSION, **({"prepkit_of_plan": made.prepkit} if made else {})},
            "overrides": list(attestation.overridden),
            "drift": to_data(attestation.drift),
            "rank": attestation.rank,
            "fingerprints": dict(attestation.fingerprints),
        },
    }
