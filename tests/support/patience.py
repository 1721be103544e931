"""Time-outs that are meant for an idle machine and hold on a busy one too.

A wait of 60 s becomes one of 150 s where five processes share two cores. It stays a bound: what hangs takes no part in
the load, so its time-out falls back as soon as the others are done, and no wait is ever longer than ``MOST`` times.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from attrs import field, frozen

MOST = 8.0
"""The most by which a time-out is multiplied."""
STAT = Path("/proc/stat")


def slowdown() -> float:
    """How many times longer work takes now than on an idle machine: runnable processes for each core, at least 1.

    The larger of the mean over the last minute, which is slow to learn of others, and the number of this moment.
    """
    runnable = os.getloadavg()[0]
    with suppress(OSError):  # /proc is there on Linux only
        lines = STAT.read_text().splitlines()
        runnable = max([runnable, *(float(line.split()[1]) for line in lines if line.startswith("procs_running"))])
    return min(MOST, max(1.0, runnable / cores()))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@frozen
class Patience:
    """A wait that may take so many seconds on an idle machine, and has begun when this value was made."""

    seconds: float
    began: float = field(factory=time.monotonic)

    def left(self) -> float:
        """Seconds that remain at the present load; at most 0 once the wait is over."""
        return self.seconds * slowdown() - self.waited()

    def waited(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began
