"""The public calls: thin over the planner and over ``live``, which is imported only when something live is given."""

from prepkit.api.acting import apply, audit, fingerprints, rehearse, watch
from prepkit.api.given import Given
from prepkit.api.planning import Example, activations, build_plan, check, fits, foreign_uses
from prepkit.api.values import diff, load, save, show

__all__ = [
    "Example",
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
    "rehearse",
    "save",
    "show",
    "watch",
]
