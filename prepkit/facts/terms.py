"""What the terms of a loss are, and what they train."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class TermFacts:
    """What the terms of a loss are, and what they train."""
