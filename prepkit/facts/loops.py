"""How a program's loop stands to its schedules, wrappers and collectives."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class ByPass:
    """A schedule that is made for every step of all passes, and is ticked less often, or more."""

    scheduler: str
    """Its class."""
    line: str
    """Where it is ticked."""
    ticks: int
    """For how many it is made."""
    passes: int
    micros: int = 0
    """Micro-batches for which accelerate ticks it once, as it is made for all of them; 0: it is ticked once a pass."""
    often: int = 0
    """How often accelerate ticks it for each of those steps: once for every process; 0: it does not."""


@frozen(kw_only=True)
class TurnFacts:
    """How a program's loop stands to its schedules, wrappers and collectives."""

    idle: tuple[str, str] = ("", "")
    """Class of a scheduler of the optimizer that steps, which no line ticks, and the line that has made it."""
    by_pass: ByPass | None = None
