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
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attrs import define, field, frozen

from tests.support.fork_server import Forked, ForkServers
from tests.support.gang_worker import Died, Hung, Outcome, Raised, Returned
from tests.support.patience import Patience

START_S = 60.0
"""Seconds for the servers to import torch and for all workers to be forked."""
GRACE_S = 10.0
"""Seconds that the other ranks get once one rank has failed; they often wait for it in a collective."""
LOOK_S = 5.0
"""Seconds between two looks at how busy the machine is."""
MOST_THREADS = 48
"""Threads of a worker beyond which it is forked anew. A group that something still holds, as DeepSpeed does, keeps
threads of gloo that wake a hundred times a second: hundreds of them take a core."""


class GangError(Exception):
    """At least one rank did not return. ``outcomes`` holds what became of every rank, in rank order."""

    def __init__(self, task: str, outcomes: tuple[Outcome, ...]) -> None:
        self.outcomes = outcomes
        ranks = (f"--- rank {rank} {_outcome_text(outcome)}" for rank, outcome in enumerate(outcomes))
        super().__init__("\n".join((f"{task} did not return on every rank", *ranks)))


def _outcome_text(outcome: Outcome) -> str:
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

    process: Forked
    wire: Connection
    log: Path
    """Receives stderr and, on ``SIGUSR1``, the stacks of all threads."""


@define
class Gang:
    """A pool of ``world`` workers. They start at the first run, and anew after a run that left one of them astray."""

    world: int
    servers: ForkServers
    """What the workers are forked from; gangs share them."""
    workers: list[Worker] = field(factory=list)
    starts: int = 0
    """How often the workers were started."""
    runs: int = 0
    """How many functions they have run."""
    meetings: TemporaryDirectory[str] = field(init=False, factory=lambda: TemporaryDirectory(prefix="gang-"))
    """Holds the stores of the groups, longer than any group: the end of a ``FileStore`` writes into its file once more,
    and where the folder goes at that moment it waits for it, for five minutes."""

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """``function(rank, world, *args)`` of every rank, in rank order, with the gloo default group up.

        ``function`` is a module-level function of a test module; it, its arguments and results travel pickled.
        Raises ``GangError`` if any rank raises, dies, or is not back after ``timeout`` seconds of an idle machine.
        """
        return self._run(function, args, timeout, grouped=True)

    def run_fresh(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """As ``run``, but with no process group, and with a launcher's variables (``RANK``, ``MASTER_PORT`` …) set."""
        return self._run(function, args, timeout, grouped=False)

    def close(self) -> None:
        """Kills the workers and forgets them."""
        for worker in self.workers:
            worker.process.send_signal(signal.SIGKILL)
        for worker in self.workers:
            _await_exit(worker.process)
            worker.wire.close()
            worker.log.unlink(missing_ok=True)
        self.workers.clear()
        self.meetings.cleanup()

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float, *, grouped: bool) -> list[Any]:
        self._start()
        self.runs += 1
        dropper = sys.modules.get("tests.support.dropped_setting")
        if dropper is not None and dropper.ACTIVE:
            function, args = dropper.under_dropped, (dropper.ACTIVE[-1], function, *args)
        meeting = str(Path(self.meetings.name) / f"{self.runs}") if grouped else str(free_port())
        # The path goes first: the worker needs it before it can unpickle the function.
        task = pickle.dumps((function, args, meeting, grouped))
        for worker in self.workers:
            worker.wire.send((tuple(sys.path), task))
        outcomes = self._gather(timeout)
        if not all(isinstance(outcome, Returned | Raised) for outcome in outcomes) or self._is_worn():
            self.close()
        else:
            for worker in self.workers:
                worker.wire.send("all are back")
        values = [outcome.value for outcome in outcomes if isinstance(outcome, Returned)]
        if len(values) < self.world:
            raise GangError(getattr(function, "__name__", repr(function)), outcomes)
        return values

    def _is_worn(self) -> bool:
        threads = (Path(f"/proc/{worker.process.pid}/task") for worker in self.workers)
        return any(len(list(folder.iterdir())) > MOST_THREADS for folder in threads if folder.is_dir())

    def _start(self) -> None:
        if self.workers and all(worker.process.exit_code() is None for worker in self.workers):
            return
        self.close()
        self.starts += 1
        Path(self.meetings.name).mkdir(exist_ok=True)
        self.workers.extend(_spawn(rank, self.world, self.servers) for rank in range(self.world))
        outcomes = self._gather(START_S)
        if not all(isinstance(outcome, Returned) for outcome in outcomes):
            self.close()
            raise GangError("starting the workers", outcomes)

    def _gather(self, timeout: float) -> tuple[Outcome, ...]:
        patience, grace = Patience(timeout), None
        missing = {worker.wire: rank for rank, worker in enumerate(self.workers)}
        outcomes: dict[int, Outcome] = {}
        while missing and (left := min(limit.left() for limit in (patience, grace) if limit)) > 0:
            for wire in wait(list(missing), min(left, LOOK_S)):
                assert isinstance(wire, Connection)
                rank = missing.pop(wire)
                outcomes[rank] = _outcome(self.workers[rank])
                if grace is None and not isinstance(outcomes[rank], Returned):
                    grace = Patience(GRACE_S)
        waited = patience.waited()
        outcomes |= {rank: Hung(waited, _stacks(self.workers[rank])) for rank in missing.values()}
        return tuple(outcomes[rank] for rank in range(self.world))


@contextmanager
def gang_of(world: int) -> Iterator[Gang]:
    """A gang with fork servers of its own, which end with the block."""
    servers = ForkServers()
    gang = Gang(world, servers)
    try:
        yield gang
    finally:
        gang.close()
        servers.close()


def _outcome(worker: Worker) -> Outcome:
    try:
        outcome: Outcome = pickle.loads(worker.wire.recv_bytes())
    except (EOFError, OSError):
        return Died(_await_exit(worker.process), _ends(worker.log.read_text(errors="replace")))
    return outcome


def _ends(log: str) -> str:
    """What a worker wrote last: why it died stands before the stacks, which are long, as is the list of modules."""
    told, _, _ = log.partition("\nExtension modules: ")
    fatal = max(told.rfind("Fatal Python error"), 0)
    before, stacks = told[max(0, fatal - 2000) : fatal], told[fatal:]
    return before + (stacks if len(stacks) < 6000 else f"{stacks[:3000]}\n…\n{stacks[-3000:]}")


def _await_exit(process: Forked) -> int | None:
    """The exit code of a process that is ending, or ``None`` if it has not ended after the grace."""
    patience = Patience(GRACE_S)
    while (code := process.exit_code()) is None and patience.left() > 0:
        time.sleep(0.01)
    return code


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


def _spawn(rank: int, world: int, servers: ForkServers) -> Worker:
    ours, theirs = Pipe()
    descriptor, name = tempfile.mkstemp(prefix=f"gang-{rank}-", suffix=".log")
    process = servers.fork(rank, world, theirs, descriptor)
    os.close(descriptor)
    theirs.close()
    return Worker(process, ours, Path(name))


def free_port() -> int:
    """A TCP port of localhost that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
