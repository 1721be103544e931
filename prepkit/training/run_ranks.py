"""What one rank of a run does for all of them, and where all meet."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TextIO

from attrs import frozen

from prepkit.loading.passes import Passes
from prepkit.ranks import launcher, rendezvous
from prepkit.ranks.peers import SEE_LOG, Peers, RankFailed, has_ended, named
from prepkit.ranks.within import check_limit, pause
from prepkit.training import run_log

if TYPE_CHECKING:
    from prepkit.loading.reduce import How


@frozen(eq=False, repr=False)
class RunRanks:
    """The ranks of one run: ``ready.ranks``."""

    _peers: Peers | None
    """The others; None: alone."""
    _asked: Callable[[str], None]
    """Raises ``RunRefused`` for a call after ``close``."""
    _passes: Passes
    _same_data: int
    """Neighbouring ranks that read the same samples, and count once."""

    @property
    def is_main(self) -> bool:
        """True on rank 0, which prints and writes what is there once."""
        return launcher.is_main()

    def print(self, *values: Any, sep: str = " ", end: str = "\n", file: TextIO | None = None) -> None:
        """``print`` on the main process alone, above a bar of ``progress`` that is open."""
        run_log.show(self.is_main, values, sep, end, file)

    def progress(self, iterable: Iterable[Any], **options: Any) -> Any:
        """The items, with a bar of tqdm on the main process where a person looks; ``options`` are tqdm's.

        A loader that goes on inside a pass begins its bar there. ``disable=False`` shows the bar in a file as well.
        """
        return run_log.bar(self.is_main, iterable, options)

    def reduce(self, value: Any, how: How = "mean") -> Any:
        """Numbers and tensors, nested or not, as mean, sum, max or min over the data ranks. Collective."""
        with named(self._peers, "ready.ranks.reduce()"):
            self._asked("ready.ranks.reduce()")
            from prepkit.loading.reduce import reduce_over_ranks

            return reduce_over_ranks(value, how, self._same_data)

    def gather(self, value: Any) -> list[Any]:
        """Return what each data rank gives, as a list with an item per rank; for what is small. Collective."""
        with named(self._peers, "ready.ranks.gather()"):
            self._asked("ready.ranks.gather()")
            from prepkit.loading.reduce import gather_over_ranks

            return gather_over_ranks(value, self._same_data)

    def gather_for_metrics(self, value: Any) -> Any:
        """Return what all ranks have made of the batches in use, each sample once (``loading.gather``). Collective."""
        with named(self._peers, "ready.ranks.gather_for_metrics()"):
            self._asked("ready.ranks.gather_for_metrics()")
            return self._passes.gather(value)

    def barrier(self, name: str = "", *, timeout_s: float = 600.0) -> None:
        """Return when every rank is here, with the same ``name``; host threads meet, devices are not waited for.

        Raises ``RankFailed`` on every rank, naming those that are not there in time, have ended, or came to a barrier
        of another name. Nobody hangs: no process group is asked. Raises ``TypeError`` for a name that is no text, and
        where ``timeout_s`` is no number; ``ValueError`` where it is not above 0 and finite.
        """
        self._asked("ready.ranks.barrier()")
        check_name(name)
        check_limit(timeout_s)
        if self._peers is not None:
            with named(self._peers, "ready.ranks.barrier()"):
                barrier(self._peers, name, timeout_s)


LOOK_S = 1.0
"""Seconds between two looks at the processes of those that are missing."""

ALL_THERE = "all are there"
"""The verdict of a barrier that every rank has reached. Any other is a failure, as JSON."""


def check_name(name: object) -> None:
    """Raises ``TypeError`` for what is no text."""
    if not isinstance(name, str):
        raise TypeError(f'{name!r:.60} is no name of a barrier; write text, such as ready.ranks.barrier("data ready")')


def barrier(peers: Peers, name: str, timeout_s: float) -> None:
    """Returns when every rank has called it with this name. Collective.

    The n-th call of each rank meets the n-th of the others, in the rendezvous store. Raises ``RankFailed`` on every
    rank where one came with another name, has ended, or is not there after ``timeout_s`` seconds.
    """
    store = peers.store
    number = store.add(f"barriers of {peers.rank}", 1)
    key = f"barrier {number}"
    store.compare_set(f"{key}/name", "", json.dumps(name))
    expected = json.loads(store.get(f"{key}/name"))
    if expected != name:
        what = f"it came to the barrier {name!r} where the first to come was at {expected!r}"
        _fail(peers, key, peers.rank, f"{what}; let every rank call the same barriers in the same order")
    store.set(f"{key}/{peers.rank}", "here")
    if store.add(f"{key}/count", 1) == peers.world:
        store.compare_set(f"{key}/verdict", "", ALL_THERE)
    _wait(peers, key, name, timeout_s)
    verdict = store.get(f"{key}/verdict")
    if verdict != ALL_THERE:
        raise RankFailed(**json.loads(verdict))
    _forget(peers, number - 1)


def _wait(peers: Peers, key: str, name: str, timeout_s: float) -> None:
    """Until the barrier has a verdict; gives it one where a rank will not come, or not in time."""
    began = time.monotonic()
    look_again = began + LOOK_S
    while not peers.store.check([f"{key}/verdict"]):
        now = time.monotonic()
        if now > look_again:
            look_again = now + LOOK_S
            for rank, sign in sorted(peers.signs.items()):
                if has_ended(sign, peers.here) and not peers.store.check([f"{key}/{rank}"]):
                    words = peers.last_words(rank)
                    what = f"its process {sign.pid} has ended before the barrier {name!r}{words}; {SEE_LOG}"
                    _fail(peers, key, rank, what)
        if now > began + timeout_s:
            missing = [rank for rank in range(peers.world) if not peers.store.check([f"{key}/{rank}"])]
            only = missing[0] if len(missing) == 1 else -1
            _fail(peers, key, only, f"barrier {name!r}: {rendezvous.late(missing, peers.world, timeout_s)}")
        time.sleep(pause(now - began))


def _fail(peers: Peers, key: str, rank: int, what: str) -> None:
    """Writes a failure, unless there is a verdict already."""
    who = f"rank {rank} of {peers.world}: " if rank >= 0 else ""
    peers.store.compare_set(f"{key}/verdict", "", json.dumps({"rank": rank, "what": f"{who}{what}"}))


def _forget(peers: Peers, number: int) -> None:
    """Takes the keys of the barrier before out of the store: all have left it who have come to this one."""
    if number < 1:
        return
    peers.store.delete(f"barrier {number}/{peers.rank}")
    if peers.rank == 0:
        for key in ("name", "count", "verdict"):
            peers.store.delete(f"barrier {number}/{key}")
