"""The other ranks, seen from one: which of them has ended, and what to say when the connection to one is lost.

Each rank signs in the rendezvous store with its process. Whoever waits for ranks of its own machine, or has lost the
connection to one, looks whether their processes are still there: exact, and at once. Of ranks on other machines a beat
tells, which a thread of theirs writes while an apply goes on.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from attrs import asdict, define, field, frozen
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not exported for checkers

from prepkit.ranks.within import PatientStore, own_connection, pause

P = ParamSpec("P")
T = TypeVar("T")

PROC = Path("/proc")
"""Where Linux shows its processes."""

BEAT_S = 2.0
"""Seconds between two beats of a rank that is in an apply."""

SILENT_S = 30.0
"""Seconds without a beat after which a rank is taken for dead or stopped. A call that holds the interpreter, as that
which loads a large library does, keeps the beat back and ends before."""

LOOK_S = 3.0
"""Seconds that a rank which has lost a connection looks for the rank that has ended."""

READ_S = 1.0
"""Seconds that rank 0 leaves to the others to read which rank was lost."""

LOST = re.compile(
    r"connection|connect|peer|socket|broken pipe|timed out|timeout|nccl|gloo|remote process|aborted", re.IGNORECASE
)
"""Words of what backends say when another rank does not answer (gloo ``transport/tcp``, ``ProcessGroupNCCL``)."""

SEE_LOG = (
    "its log says why; killed for memory, the machine's log does (dmesg); aborted by gloo or NCCL, ranks have called "
    "different things, as where one alone saves, evaluates or runs a forward: call them on every rank"
)


class RankFailed(RuntimeError):
    """Another rank could not go on, so this one did not either. ``rank`` is the first that failed; -1: not known."""

    def __init__(self, rank: int, what: str) -> None:
        self.rank = rank
        super().__init__(what)


@frozen(kw_only=True)
class Sign:
    """Which process a rank is."""

    place: str
    """Of the machine and its process numbers; empty where it is not known, and nobody looks."""
    pid: int
    started: str
    """In ticks since the machine's start: another process may get the number."""


def own_sign() -> Sign:
    """Of this process."""
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        place = f"{boot} {(PROC / 'self/ns/pid').readlink()}"
        pid = int((PROC / "self").readlink().name)
    except OSError:  # not Linux
        return Sign(place="", pid=0, started="")
    return Sign(place=place, pid=pid, started=_stat(pid)[1])


def has_ended(sign: Sign, here: Sign) -> bool:
    """True if the process is known to have ended; False also where that cannot be seen from ``here``."""
    if not sign.place or sign.place != here.place:
        return False
    state, started = _stat(sign.pid)
    return state in "ZX" or started != sign.started


def _stat(pid: int) -> tuple[str, str]:
    """State and start of a process; empty where there is none (``proc_pid_stat``, fields 3 and 22)."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


@define(eq=False, repr=False)
class Peers:
    """The ranks of one apply. Reads and writes under ``prefix`` in the store."""

    store: PatientStore
    rank: int
    world: int
    here: Sign = field(factory=own_sign, init=False)
    signs: dict[int, Sign] = field(factory=dict, init=False)
    """Of the ranks whose sign was read."""
    last_call: str = field(default="", init=False)
    """The last of the run's calls that this rank made, such as ``ready.step()``."""
    calls: int = field(default=0, init=False)
    """How often it has come into one of them, also out of one inside."""
    meetings: int = field(default=0, init=False)
    """How often it has come to ``meet``."""
    entered: float | None = field(default=None, init=False)
    """When it came into the call that it is in, by ``time.monotonic``; None: it is in none."""
    at_exit: Callable[[], None] | None = field(default=None, init=False, eq=False)
    """Leaves the last words of this rank; see ``report_end``."""
    _heard: dict[int, tuple[str, float]] = field(factory=dict, init=False)
    """The last beat of a rank, and when it was new."""
    _quiet: threading.Event = field(factory=threading.Event, init=False)
    _settled: bool = field(default=False, init=False)

    def sign(self) -> None:
        """Says which process this rank is."""
        self.store.set(f"sign/{self.rank}", json.dumps(asdict(self.here)))

    def enter(self, call: str) -> str | None:
        """Comes into a call. Returns what ``leave`` wants: the call around it, where there is one."""
        outer = None if self.entered is None else self.last_call
        self.last_call, self.entered = call, time.monotonic()
        self.calls += 1
        return outer

    def leave(self, outer: str | None) -> None:
        """Returns from a call, into the one around it or into none."""
        if outer is None:
            self.entered = None
        else:
            self.enter(outer)

    def beat(self) -> None:
        """Begins to beat, over a connection of its own; torch before 2.9 gives none, and nothing beats."""
        threading.Thread(target=_beat, args=(self.store.store, f"beat/{self.rank}", self._quiet), daemon=True).start()

    def rest(self) -> None:
        """Beats no longer."""
        self._quiet.set()

    def settle(self) -> None:
        """The apply is over on every rank: none beats from now on, so that silence says nothing."""
        self.rest()
        self._settled = True

    def ended(self, ranks: Iterable[int]) -> Iterator[tuple[int, str]]:
        """Those of the ranks that will not come, each with how that is known."""
        for rank in ranks:
            if rank not in self.signs and self.store.check([f"sign/{rank}"]):
                self.signs[rank] = Sign(**json.loads(self.store.get(f"sign/{rank}")))
            if (sign := self.signs.get(rank)) is None or rank == self.rank:
                continue
            if has_ended(sign, self.here):
                yield rank, f"its process {sign.pid} has ended{self.last_words(rank)}; {SEE_LOG}"
            elif (since := self._silent_for(rank)) > SILENT_S:
                yield rank, f"it has given no sign of life for {since:.0f} s; {SEE_LOG}"

    def _silent_for(self, rank: int) -> float:
        """Seconds since its last beat that was new; 0 where it has never beaten, or need not beat any longer."""
        key, now = f"beat/{rank}", time.monotonic()
        if self._settled or not self.store.check([key]):
            return 0.0
        beat = self.store.get(key)
        if self._heard.get(rank, ("", now))[0] != beat:
            self._heard[rank] = (beat, now)
        return now - self._heard[rank][1]

    def meet(self, most_s: float) -> tuple[int, ...]:
        """Wait until every rank has made this call as often as this one; those that have not after so many seconds.

        Raises ``RankFailed`` where one will not come.
        """
        self.meetings += 1
        place = f"meeting/{self.meetings}"
        self.store.set(f"{place}/{self.rank}", "here")
        if self.store.add(f"{place}/count", 1) == self.world:
            self.store.set(f"{place}/met", "all")
        began = look_again = time.monotonic()
        while not self.store.check([f"{place}/met"]):
            now = time.monotonic()
            if now > look_again:
                look_again = now + LOOK_S
                if gone := self._known_to_have_ended():
                    raise self._tell(gone)
            if now > began + most_s:
                if self.store.add(f"{place}/count", -1) == self.world - 1:
                    break  # the last has come at this moment
                self.store.delete(f"{place}/{self.rank}")
                self.meetings -= 1
                others = (rank for rank in range(self.world) if rank != self.rank)
                return tuple(rank for rank in others if not self.store.check([f"{place}/{rank}"]))
            time.sleep(pause(now - began))
        return ()

    def lost(self, error: BaseException) -> RankFailed | None:
        """What to raise in the place of torch's error where the connection to another rank is lost; None: other errors.

        The first rank that finds out writes which it was, and all of them report the same.
        """
        if not lost_connection(error):
            return None
        with suppress(RuntimeError):
            self.store.set(f"call/{self.rank}", self.last_call)
        until = time.monotonic() + LOOK_S
        while True:
            if (told := self._told()) is not None:
                return told
            if gone := self._known_to_have_ended():
                return self._tell(gone)
            if time.monotonic() > until:
                what = f"another of the {self.world} ranks did not answer: its log says why, where it has ended; where "
                what += f"it has not, let every rank make the same calls{self._calls()}"
                return RankFailed(-1, f"{what}. torch says: {error}")
            time.sleep(0.05)

    def _calls(self) -> str:
        """The last calls of the ranks that have lost a connection as well, for the end of a message."""
        known: dict[str, list[int]] = {}
        with suppress(RuntimeError):
            for rank in range(self.world):
                if self.store.check([f"call/{rank}"]) and (call := self.store.get(f"call/{rank}")):
                    known.setdefault(call, []).append(rank)
        said = [f"rank{'s' * (len(at) > 1)} {', '.join(map(str, at[:8]))} in {call}" for call, at in known.items()]
        alike = [at for call, at in known.items() if call == "ready.backward()" and len(at) > 1]
        layers = ", where each may have run other layers: run the same on all" if alike and len(known) == 1 else ""
        return f". Their last calls were: {'; '.join(said)}{layers}" if said else ""

    def _tell(self, gone: list[tuple[int, str]]) -> RankFailed:
        """Says which ranks have ended, unless another rank has said so before; returns what was said."""
        rank, what = gone[0][0], f"rank {gone[0][0]} of {self.world} was lost: {gone[0][1]}"
        if len(gone) > 1:  # those that lost the first have ended in turn, and took the store with them
            ranks = ", ".join(str(rank) for rank, _ in gone)
            rank, what = -1, f"ranks {ranks} of {self.world} were lost: the log of the one that ended first says why"
        with suppress(RuntimeError):
            self.store.compare_set("lost", "", json.dumps({"rank": rank, "what": what}))
        told = self._told() or RankFailed(rank, what)
        if self.rank == 0:  # which often serves the store: whoever hears of its end shall read this before
            time.sleep(READ_S)
        return told

    def _told(self) -> RankFailed | None:
        with suppress(RuntimeError):
            if self.store.check(["lost"]):
                return RankFailed(**json.loads(self.store.get("lost")))
        return None

    def _known_to_have_ended(self) -> list[tuple[int, str]]:
        """As ``ended``; of those alone whose signs were read before, where the store has gone."""
        with suppress(RuntimeError):
            return list(self.ended(range(self.world)))
        gone = [(rank, sign) for rank, sign in self.signs.items() if has_ended(sign, self.here)]
        return [(rank, f"its process {sign.pid} has ended; {SEE_LOG}") for rank, sign in gone]

    def report_end(self) -> None:
        """Makes this rank write its last words when its script ends, unless ``retract`` is called before.

        They say what the script raised and where the run was; whoever loses the connection repeats them. A process that
        is killed leaves none, nor does one of ``multiprocessing``, which ends without Python's exit functions. What
        aborts a process, as gloo and NCCL do where ranks call different collectives, makes ``faulthandler`` write the
        lines that its threads were at to standard error; it stays enabled.
        """
        self.at_exit = partial(_write_last_words, self)
        atexit.register(self.at_exit)
        if not faulthandler.is_enabled() and sys.__stderr__ is not None:
            with suppress(OSError, ValueError, AttributeError):  # one without a file descriptor, as in a notebook
                faulthandler.enable(sys.__stderr__)

    def retract(self) -> None:
        """Takes ``report_end`` back: the run was closed, and nobody loses this rank."""
        if self.at_exit is not None:
            atexit.unregister(self.at_exit)
            self.at_exit = None

    def last_words(self, rank: int) -> str:
        """The last words of a rank in brackets, for the end of a message; empty where there are none."""
        with suppress(RuntimeError):
            if self.store.check([f"words/{rank}"]):
                return f" ({self.store.get(f'words/{rank}')})"
        return ""

    def read_signs(self) -> None:
        """Reads the signs of all ranks while the store is there."""
        for _ in self.ended(range(self.world)):
            pass


def _write_last_words(peers: Peers) -> None:
    error: BaseException | None = getattr(sys, "last_value", None)  # set by Python for what ended the script
    how = "its script came to an end" if error is None else f"it raised {type(error).__name__}: {error!s:.300}"
    where = f"; the last call of its run was {peers.last_call}" if peers.last_call else ""
    with suppress(RuntimeError):  # at once, without the threads of ``PatientStore``: none starts at the exit
        peers.store.store.set(f"words/{peers.rank}", f"{how}{where}, before ready.close()")


def _beat(shared: Store, key: str, quiet: threading.Event) -> None:
    count = 0
    with suppress(RuntimeError):  # the store has gone, and with it everybody who could read there
        store = own_connection(shared)  # here, because a process that serves the store and is stopped never connects
        while store is not None and not quiet.is_set():
            count += 1
            store.set(key, str(count))
            quiet.wait(BEAT_S)


def lost_connection(error: BaseException | None) -> bool:
    """True if the error or one of its causes is a backend's report that another rank does not answer."""
    while error is not None:
        if isinstance(error, RuntimeError) and not isinstance(error, RankFailed) and LOST.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def named(peers: Peers | None, call: str = "") -> Iterator[None]:
    """Name the lost rank in errors that are raised inside because it was lost. ``call``: the call of the run."""
    if peers is None:
        yield
        return
    outer = peers.enter(call) if call else None
    try:
        yield
    except RuntimeError as error:
        if (failure := peers.lost(error)) is not None:
            raise failure from error
        raise
    finally:
        if call:
            peers.leave(outer)


def names_lost_rank(method: Callable[P, T]) -> Callable[P, T]:
    """A method of something that has ``_peers``: what it raises because a rank was lost names that rank."""
    name = f"ready.{method.__name__}()"

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:  # without ``named``: a step calls it twice
        owner: Any = args[0]
        peers: Peers | None = owner._peers
        if peers is None:
            return method(*args, **kwargs)
        outer = peers.enter(name)
        try:
            return method(*args, **kwargs)
        except RuntimeError as error:
            if (failure := peers.lost(error)) is not None:
                raise failure from error
            raise
        finally:
            peers.leave(outer)

    return call
