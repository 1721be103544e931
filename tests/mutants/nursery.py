"""Forked children that each do one thing and send one value back."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

ROOM = 8 * 2**30
"""Bytes of address space that a child may take."""


@frozen
class Ended:
    """A child that sent no value: it was killed, ran too long, or its function raised."""

    how: str
    notes: tuple[Any, ...]
    """What it has noted, in order."""


@define
class Child:
    """A process and what it has sent so far."""

    pid: int
    wire: Connection
    deadline: float
    folder: Path
    noted: list[Any] = field(factory=list)
    waited_s: float | None = None
    """CPU seconds, once it has been waited for."""


Note = Callable[[Any], None]


@define
class Nursery:
    """Children by key. Each has a process group and a temporary folder of its own; both go when it ends."""

    children: dict[Any, Child] = field(factory=dict)
    cpu_s: float = 0.0
    """What the children that have ended took."""

    def start(self, key: Any, act: Callable[[Note], Any], wall_s: float) -> None:
        """Forks; the child calls ``act(note)`` and sends what it returns. ``note`` tells how far it is."""
        ours, theirs = Pipe()
        folder = Path(tempfile.mkdtemp(prefix="mutant-"))
        pid = os.fork()
        if pid == 0:
            ours.close()
            _live(theirs, folder, act)
        theirs.close()
        self.children[key] = Child(pid, ours, time.monotonic() + wall_s, folder)

    @property
    def wires(self) -> list[Connection]:
        """What to wait on."""
        return [child.wire for child in self.children.values()]

    @property
    def patience_s(self) -> float:
        """Seconds until the next child has run too long."""
        ends = [child.deadline for child in self.children.values()]
        return max(0.0, min(ends, default=time.monotonic() + 3600) - time.monotonic())

    def ended(self) -> list[tuple[Any, Any]]:
        """Keys and values of the children that have ended since the last call; ``Ended`` for those without a value."""
        found = []
        for key, child in list(self.children.items()):
            if (value := _news(child)) is not _NOTHING:
                del self.children[key]
                self.cpu_s += _end(child)
                found.append((key, value))
        return found


_NOTHING = object()


def _live(wire: Connection, folder: Path, act: Callable[[Note], Any]) -> None:
    """The child: never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        _bound_memory()
        quiet = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(quiet, descriptor)
        os.environ["TMPDIR"] = os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)
        tempfile.tempdir = str(folder)
        wire.send(("value", act(lambda value: wire.send(("note", value)))))
        code = 0
    except BaseException:
        with suppress(Exception):
            wire.send(("raised", traceback.format_exc()))
    finally:
        sys.stdout = sys.stderr = None  # type: ignore[assignment]  # nothing is flushed twice
        os._exit(code)


def _bound_memory() -> None:
    """A mutant that fills the memory meets ``MemoryError`` before the machine does."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        size = int(pages.read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, hard))


def _news(child: Child) -> Any:
    try:
        while child.wire.poll():
            kind, value = child.wire.recv()
            if kind == "value":
                return value
            if kind == "raised":
                return Ended(f"raised:\n{value}", tuple(child.noted))
            child.noted.append(value)
    except (EOFError, OSError, pickle.UnpicklingError):
        _, status, usage = os.wait4(child.pid, 0)
        child.waited_s = usage.ru_utime + usage.ru_stime
        how = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "exited"
        return Ended(how, tuple(child.noted))
    return Ended("time-out", tuple(child.noted)) if time.monotonic() > child.deadline else _NOTHING


def _end(child: Child) -> float:
    """With all that it started. The CPU seconds that it took."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    if child.waited_s is None:
        _, _, usage = os.wait4(child.pid, 0)
        child.waited_s = usage.ru_utime + usage.ru_stime
    child.wire.close()
    shutil.rmtree(child.folder, ignore_errors=True)
    return child.waited_s
