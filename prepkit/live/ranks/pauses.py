"""How long a rank pauses between two looks whether the others have come."""

from __future__ import annotations

FIRST_S = 0.001
LONGEST_S = 0.1


def pause(waited_s: float) -> float:
    """A tenth of what was waited so far, in seconds: so much at most is lost once all are there.

    No shorter than a millisecond, and no longer than ``LONGEST_S``: thousands of ranks may be asking one store.

    >>> pause(0.0), pause(0.2), pause(600.0)
    (0.001, 0.02, 0.1)
    """
    return min(max(FIRST_S, waited_s / 10), LONGEST_S)
