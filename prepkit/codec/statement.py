"""An attestation as an in-toto Statement, which stock tools sign and verify: no cryptography is prepkit's own."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

from prepkit.codec import to_data
from prepkit.plan.attestation import Attestation
from prepkit.version import VERSION

TYPE = "https://in-toto.io/Statement/v1"
PREDICATE = "https://prepkit.dev/attestation/v1"
"""What the predicate is; an identifier, and no page."""


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
        "subject": [
            {"name": name, "digest": {"sha256": digest.removeprefix("sha256:")}}
            for name, digest in subjects.items()
            if digest
        ],
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
