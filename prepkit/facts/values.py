"""Values that a program has changed on the way, and how its weights began."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class ValueFacts:
    """Values that a program has changed on the way, and how its weights began."""
