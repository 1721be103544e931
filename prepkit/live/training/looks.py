"""How often a loop looks at what costs too much to look at in each window."""

from __future__ import annotations

OFTEN = 64
"""Windows between two looks, once the first few are over."""


def due(window: int) -> bool:
    """Whether a window is looked at: the first, second, fourth, eighth ... and each 64th; the same on every rank.

    >>> [window for window in range(1, 200) if due(window)]
    [1, 2, 4, 8, 16, 32, 64, 128, 192]
    """
    return not window & (window - 1) or not window % OFTEN
