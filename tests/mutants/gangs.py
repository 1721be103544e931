"""Gangs whose workers are forked from the child that tests a mutant: torch is there, and so is the mutant."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from attrs import define

from tests.mutants.reach import Lines, Tracer

FOLDER = "MUTANTS_LINES"
"""Environment variable: where workers leave the lines that they ran, if anybody wants to know."""


@define
class Forked:
    """What a gang asks of a worker's process; this process is its parent."""

    pid: int
    lifeline: int
    """A pipe's end that is never written to: the worker ends when it closes."""
    status: int | None = None

    def exit_code(self) -> int | None:
        """The exit code once it has ended, negative for a signal."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status

    def send_signal(self, number: int) -> None:
        """A signal, unless it has ended."""
        if self.exit_code() is None:
            os.kill(self.pid, number)


def fork_workers() -> None:
    """From now on gangs of this process fork their workers. To be called before the tests, and before any backward."""
    from tests.support import fork_server

    fork_server.ForkServers.fork = _fork  # type: ignore[assignment,method-assign]


def _fork(servers: object, rank: int, world: int, wire: Connection, log: int) -> Forked:
    """In place of ``ForkServers.fork``."""
    del servers
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writes)
        os.dup2(reads, 0)
        os.dup2(log, 2)
        _work(rank, world, wire.fileno())
    os.close(reads)
    return Forked(pid, writes)


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
