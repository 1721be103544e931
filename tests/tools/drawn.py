"""Trains drawn legal configs on two and four processes, and prints those that fail or learn otherwise: ``make drawn``.

With numbers as arguments: how many draws (200 by default), and the seed (0).
"""

from __future__ import annotations

import sys

from tests.support.drawn_training import wrong


def main() -> None:
    """Ends with 1 where any case is wrong."""
    number, start = (*map(int, sys.argv[1:]), *(200, 0)[len(sys.argv) - 1 :])
    bad = 0
    for world in (2, 4):
        ran = 0
        for case, what in wrong(world, number, start):
            ran += 1
            if what:
                bad += 1
                print(f"{world} processes: {case}\n{what}\n", flush=True)
        print(f"{ran} configs on {world} processes", flush=True)
    sys.exit(min(bad, 1))


if __name__ == "__main__":
    main()
