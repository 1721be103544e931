"""What several phases of one program do to each other: stages, evaluations, trainings one after the other."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Outlived:
    """A scheduler that is ticked on, and whose optimizer steps no more."""

    scheduler: str
    """Its class."""
    line: str
    """That ticks it."""
    optimizer: str
    """Class of the optimizer that steps in the place of its own."""
    made: str
    """The line that has made that one; empty: not known."""


@frozen(kw_only=True)
class PhaseFacts:
    """What several phases of one program do to each other."""

    outlived: tuple[Outlived, ...] = ()
    taken_over: bool = False
    """Whether an optimizer that holds parameters of the first one has stepped since that one did."""
