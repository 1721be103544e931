"""How a loop shares its work over micro-batches, ranks and steps."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class ShareFacts:
    """How a loop shares its work over micro-batches, ranks and steps."""

    twice: tuple[str, str, int] = ("", "", 0)
    """The line that hands a loss to a library, the library, and the number by which both have divided it."""
    clipped_late: tuple[str, str] = ("", "")
    """The line that clips behind the step, with nothing that steps behind it, and the line of the step."""
    clipped_between: tuple[str, ...] = ()
    """Lines that have clipped gradients again which had grown since they were clipped."""
    gathered: tuple[tuple[str, int], ...] = ()
    """Lines that have gathered outputs over ranks, whose own part went into the loss without its graph, and of how
    many ranks."""
    misplaced: tuple[tuple[str, int, int], ...] = ()
    """Lines that have compared samples of this rank with gathered ones, the first column that they take for their
    own, and that where their own begin."""
    unwaited: tuple[tuple[str, str], ...] = ()
    """Lines that have begun a collective over gradients which nobody has waited for, and the function."""
    kept: tuple[tuple[str, str, int], ...] = ()
    """Names of the program that keep the graphs of earlier steps, with their file, and of how many."""
