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
class LeftBehind:
    """What of a model trains no more, or never has, though it is to."""

    model: str
    """Its class."""
    name: str
    """The first parameter or module."""
    count: int
    line: str
    """That steps."""


@frozen(kw_only=True)
class PhaseFacts:
    """What several phases of one program do to each other."""

    outlived: tuple[Outlived, ...] = ()
    taken_over: bool = False
    """Whether an optimizer that holds parameters of the first one has stepped since that one did."""
    unheld: tuple[LeftBehind, ...] = ()
    """Weights that were frozen, get gradients now, and that no optimizer steps."""
    merged: tuple[LeftBehind, ...] = ()
    """Modules whose trained weights get gradients no more since a frozen one beside them was written."""
    loose: tuple[str, ...] = ()
    """Parameters that get gradients, stand in no module, and that no optimizer holds: names with their holders."""
