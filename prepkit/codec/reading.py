"""The bytes of a file that somebody has named: bounded in size, and in time where the file is a pipe."""

from __future__ import annotations

import os
import select
import stat
import time

PIPE_S = 10.0
"""Seconds that a pipe may take to deliver all that it has: ``prepkit show <(cat plan.json)`` is one, and so is a FIFO
that nobody writes to, for which ``open`` would wait for ever."""


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """The first ``most`` bytes of a file. Raises ``OSError``; ``TimeoutError`` for a pipe that is not done in time."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # so that a FIFO without writer opens
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return file.read(most)
        return _read_pipe(descriptor, most)


def _read_pipe(descriptor: int, most: int) -> bytes:
    until = time.monotonic() + PIPE_S
    parts: list[bytes] = []
    while (left := most - sum(map(len, parts))) > 0:
        ready, _, _ = select.select([descriptor], [], [], max(until - time.monotonic(), 0.0))
        if not ready:
            raise TimeoutError(0, f"it is a pipe, and whoever writes to it was not done after {PIPE_S:.0f} s")
        part = os.read(descriptor, min(left, 2**20))
        if not part:
            break
        parts.append(part)
    return b"".join(parts)
