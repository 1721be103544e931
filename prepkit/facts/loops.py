"""How a program's loop stands to its schedules, wrappers and collectives, shares its work, and what it leaves out."""

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


@frozen(kw_only=True)
class LessonFacts:
    """What the lessons of a loop miss: batches, tokens, and what a maker is to learn."""

    skips: tuple[tuple[str, str, int], ...] = ()
    """Lines that read, in each pass, a loader which leaves its first batches out; its name, and how many these are."""
    new_tokens: tuple[tuple[str, int, int, int], ...] = ()
    """Frozen embeddings that were made larger, and are read where they are new: the line, how many rows are new, the
    first of them, and one that was read."""
    judged_alike: tuple[tuple[str, str, str], ...] = ()
    """Lines that teach a maker, of what it gives, the same that its judge is taught, and the classes of both; the first
    of these is empty where nobody knows it."""


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
