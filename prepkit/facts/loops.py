"""How a program's loop stands to its schedules, wrappers and collectives."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class TurnFacts:
    """How a program's loop stands to its schedules, wrappers and collectives."""
