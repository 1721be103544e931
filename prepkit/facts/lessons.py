"""What the lessons of a loop miss: batches, tokens, and what a maker is to learn."""

from __future__ import annotations

from attrs import frozen


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
