"""Waiting for threads that torch has started and gives nobody a handle to."""

from __future__ import annotations

import threading
import time
from pathlib import Path

THREADS = Path("/proc/self/task")
"""A folder for each thread of this process, on Linux."""
LOOK_S = 0.001
LOOKS = 3
"""Looks in a row that find nothing running: between two of them a thread that waits for the interpreter gets it."""
ELSEWHERE_S = 0.05
"""How long to wait where nothing says what threads do."""


def until_threads_rest(most_s: float = 0.5) -> bool:
    """Waits until no other thread of this process runs, or is about to; whether that was so within ``most_s`` seconds.

    A worker thread of gloo tells that its work is done before it lets go of it, and with it of the group.
    """
    if not THREADS.is_dir():
        time.sleep(min(ELSEWHERE_S, most_s))
        return False
    until, quiet = time.monotonic() + most_s, 0
    while quiet < LOOKS:
        if time.monotonic() > until:
            return False
        time.sleep(LOOK_S)
        quiet = 0 if _others_run() else quiet + 1
    return True


def _others_run() -> bool:
    own = str(threading.get_native_id())
    return any(_state(thread) == "R" for thread in THREADS.iterdir() if thread.name != own)


def _state(thread: Path) -> str:
    try:
        said = (thread / "stat").read_text()
    except OSError:  # it has ended meanwhile
        return ""
    return said.rpartition(")")[2].split()[0]  # its name, in brackets, may hold anything
