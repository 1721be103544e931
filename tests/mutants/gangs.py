"""Gangs whose workers are forked from the child that tests a mutant: torch is there, and so is the mutant."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from attrs import define

from tests.mutants.reach import Lines, Tracer

FOLDER = "MUTANTS_LINES"
"""Environment variable: where workers leave the lines that they ran, if anybody wants to know."""


@define
class Forked:
    """As much of ``subprocess.Popen`` as a gang asks of a worker."""

    pid: int
    stdin: Any
    status: int | None = None

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        if self.status is None:
            with suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status

    def wait(self, timeout: float = 60.0) -> int | None:
        """The exit code, once it has ended. Raises ``subprocess.TimeoutExpired``."""
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("worker", timeout)
            time.sleep(0.01)
        return self.status

    def send_signal(self, number: int) -> None:
        """As ``os.kill``."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """For good."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def fork_workers() -> None:
    """From now on gangs of this process fork their workers. To be called before the tests, and before any backward."""
    from tests.support import gang

    gang._spawn = _spawn  # type: ignore[assignment]


def _spawn(rank: int, world: int) -> Any:
    from tests.support import gang

    ours, theirs = Pipe()
    descriptor, name = tempfile.mkstemp(prefix=f"gang-{rank}-", suffix=".log")
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.close(writes)
        os.dup2(reads, 0)
        os.dup2(descriptor, 2)
        _work(rank, world, theirs.fileno())
    os.close(descriptor)
    os.close(reads)
    theirs.close()
    return gang.Worker(Forked(pid, os.fdopen(writes, "wb")), ours, Path(name))  # type: ignore[arg-type]


def _work(rank: int, world: int, descriptor: int) -> None:
    from tests.support import gang_worker

    code = 1
    try:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.environ["OMP_NUM_THREADS"] = "1"
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        if FOLDER in os.environ:
            gang_worker._attempt = _traced(gang_worker._attempt)
        gang_worker.work(rank, world, descriptor)
        code = 0
    finally:
        os._exit(code)


def _traced(attempt: Callable[[int, int, bytes], Any]) -> Callable[[int, int, bytes], Any]:
    def act(rank: int, world: int, task: bytes) -> Any:
        tracer = Tracer()
        with tracer:
            outcome = attempt(rank, world, task)
        file = Path(os.environ[FOLDER]) / f"{os.getpid()}-{time.monotonic_ns()}.json"
        file.write_text(json.dumps({path: sorted(lines) for path, lines in tracer.lines().items()}))
        return outcome

    return act


def gathered(folder: Path) -> Lines:
    """The lines that workers have left there, which are then forgotten."""
    found: Lines = defaultdict(set)
    for file in folder.glob("*.json"):
        for path, lines in json.loads(file.read_text()).items():
            found[path] |= set(lines)
        file.unlink()
    return found
