"""Worker processes that stay up for the whole test session and run test functions under a real gloo process group.

``gang.run(function, *args)`` calls ``function(rank, world, *args)`` in every worker, with a fresh default group, and
gives back what each rank returned. What goes wrong is one ``GangError`` that shows every rank: its exception with the
remote traceback, how it died, or the stacks of all its threads when it hung. No worker outlives its parent.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from tests.support.gang_worker import Died, Hung, Outcome, Raised, Returned

ROOT = Path(__file__).resolve().parents[2]
START_S = 180.0
"""Seconds for all workers to import torch, on a machine that may be busy."""
GRACE_S = 5.0
"""Seconds that the other ranks get once one rank has failed; they often wait for it in a collective."""


class GangError(Exception):
    """At least one rank did not return. ``outcomes`` holds what became of every rank, in rank order."""

    def __init__(self, what: str, outcomes: tuple[Outcome, ...]) -> None:
        self.outcomes = outcomes
        parts = (f"--- rank {rank} {_told(outcome)}" for rank, outcome in enumerate(outcomes))
        super().__init__("\n".join((f"{what} did not return on every rank", *parts)))


def _told(outcome: Outcome) -> str:
    match outcome:
        case Returned(value):
            return f"returned {value!r:.200}"
        case Raised(text):
            return f"raised:\n{text}"
        case Died(code, log):
            return f"died with exit code {code}; it wrote:\n{log}"
        case Hung(waited_s, stacks):
            return f"did not return within {waited_s:.0f} s; its stacks:\n{stacks}"


@frozen
class Worker:
    """One process and the wire to it."""

    process: subprocess.Popen[bytes]
    wire: Connection
    log: Path
    """Receives stderr and, on ``SIGUSR1``, the stacks of all threads."""


@define
class Gang:
    """A pool of ``world`` workers. They start at the first run, and anew after a run that left one of them astray."""

    world: int
    workers: list[Worker] = field(factory=list)
    starts: int = 0
    """How often the workers were started."""

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """``function(rank, world, *args)`` of every rank, in rank order, with the gloo default group up.

        ``function`` is a module-level function of a test module; it, its arguments and results travel pickled.
        Raises ``GangError`` if any rank raises, dies, or is not back after ``timeout`` seconds.
        """
        return self._run(function, args, timeout, grouped=True)

    def run_fresh(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """As ``run``, but with no process group, and with a launcher's variables (``RANK``, ``MASTER_PORT`` …) set."""
        return self._run(function, args, timeout, grouped=False)

    def close(self) -> None:
        """Kills the workers and forgets them."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.wait()
            worker.wire.close()
            assert worker.process.stdin is not None, "workers are started with a pipe as stdin"
            worker.process.stdin.close()
            worker.log.unlink(missing_ok=True)
        self.workers.clear()

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float, *, grouped: bool) -> list[Any]:
        self._start()
        with tempfile.TemporaryDirectory(prefix="gang-") as folder:
            meeting = str(Path(folder) / "store") if grouped else str(free_port())
            # The path goes first: the worker needs it before it can unpickle the function.
            task = pickle.dumps((function, args, meeting, grouped))
            for worker in self.workers:
                worker.wire.send((tuple(sys.path), task))
            outcomes = self._gather(timeout)
            if all(isinstance(outcome, Returned | Raised) for outcome in outcomes):
                for worker in self.workers:
                    worker.wire.send("all are back")
            else:
                self.close()
        values = [outcome.value for outcome in outcomes if isinstance(outcome, Returned)]
        if len(values) < self.world:
            raise GangError(getattr(function, "__name__", repr(function)), outcomes)
        return values

    def _start(self) -> None:
        if self.workers and all(worker.process.poll() is None for worker in self.workers):
            return
        self.close()
        self.starts += 1
        self.workers.extend(_spawn(rank, self.world) for rank in range(self.world))
        outcomes = self._gather(START_S)
        if not all(isinstance(outcome, Returned) for outcome in outcomes):
            self.close()
            raise GangError("starting the workers", outcomes)

    def _gather(self, timeout: float) -> tuple[Outcome, ...]:
        began = time.monotonic()
        deadline = began + timeout
        missing = {worker.wire: rank for rank, worker in enumerate(self.workers)}
        found: dict[int, Outcome] = {}
        while missing and (left := deadline - time.monotonic()) > 0:
            for wire in wait(list(missing), left):
                assert isinstance(wire, Connection)
                rank = missing.pop(wire)
                found[rank] = _outcome(self.workers[rank])
                if not isinstance(found[rank], Returned):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        waited = time.monotonic() - began
        found |= {rank: Hung(waited, _stacks(self.workers[rank])) for rank in missing.values()}
        return tuple(found[rank] for rank in range(self.world))


def _outcome(worker: Worker) -> Outcome:
    try:
        outcome: Outcome = pickle.loads(worker.wire.recv_bytes())
    except (EOFError, OSError):
        return Died(worker.process.wait(GRACE_S), worker.log.read_text(errors="replace")[-4000:])
    return outcome


def _stacks(worker: Worker) -> str:
    """Stacks of all threads, written by faulthandler's C handler, so also while one waits in a collective."""
    before = worker.log.stat().st_size
    worker.process.send_signal(signal.SIGUSR1)
    size = before
    for _ in range(30):  # until the dump has come and has stopped growing, at most 3 s
        time.sleep(0.1)
        size, last = worker.log.stat().st_size, size
        if size == last > before:
            break
    return worker.log.read_bytes()[before:].decode(errors="replace") or "(no answer to SIGUSR1)"


def _spawn(rank: int, world: int) -> Worker:
    ours, theirs = Pipe()
    descriptor, name = tempfile.mkstemp(prefix=f"gang-{rank}-", suffix=".log")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # the host's name need not resolve
    process = subprocess.Popen(
        [sys.executable, "-c", f"from tests.support.gang_worker import work; work({rank}, {world}, {theirs.fileno()})"],
        stdin=subprocess.PIPE,  # never written to: its end tells the worker that we are gone
        stderr=descriptor,
        pass_fds=(theirs.fileno(),),
        env=environment,
        cwd=ROOT,
    )
    os.close(descriptor)
    theirs.close()
    return Worker(process, ours, Path(name))


def free_port() -> int:
    """A TCP port of localhost that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
