"""The public calls: thin over the rooms that act, which are imported when they are first needed."""

from prepkit.api.acting import apply, audit, fingerprints, prove, rehearse, watch
from prepkit.api.given import Given
from prepkit.api.planning import ExampleInputs, activations, build_plan, check, fits, foreign_uses
from prepkit.api.values import diff, load, save, show

__all__ = [
    "ExampleInputs",
    "Given",
    "activations",
    "apply",
    "audit",
    "build_plan",
    "check",
    "diff",
    "fingerprints",
    "fits",
    "foreign_uses",
    "load",
    "prove",
    "rehearse",
    "save",
    "show",
    "watch",
]
