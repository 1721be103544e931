"""A barrier in host memory that names who is late: no collective, so that nobody hangs in it."""

from __future__ import annotations

import json
import time

from prepkit.ranks import rendezvous
from prepkit.ranks.peers import SEE_LOG, Peers, RankFailed, has_ended
from prepkit.ranks.within import pause

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
