"""Whatever prepkit hands out, as the text that people read."""

from __future__ import annotations

from typing import Any

from prepkit.codec.diff import Set, Splice
from prepkit.findings import Finding
from prepkit.plan import Plan
from prepkit.plan.attestation import Attestation
from prepkit.render.changes import diff_text
from prepkit.render.findings import findings_text
from prepkit.render.plan import plan_text


def text_of(value: Any) -> str:
    """A plan on its whole page, an attestation, the findings of ``pk.check``, or the changes of ``pk.diff``.

    Raises ``TypeError`` for anything else.
    """
    match value:
        case Plan():
            return plan_text(value)
        case Attestation():
            return str(value)
        case ():
            return "nothing: no findings, no differences"
        case (Finding(), *_):
            return findings_text(value)
        case (Set() | Splice(), *_):
            return diff_text(value)
        case _:
            kind = type(value).__name__
            raise TypeError(
                f"{kind} cannot be shown; give a plan, an attestation, an audit, findings, or the changes of pk.diff"
            )
