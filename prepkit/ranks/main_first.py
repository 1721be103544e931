"""Work of the main process before the others, such as a download that all of them then read from the disk."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, but not exported for checkers
from torch.distributed.distributed_c10d import _get_default_store  # torch has no public door to it

from prepkit.ranks import launcher, rendezvous
from prepkit.ranks.peers import Peers, RankFailed
from prepkit.ranks.within import PatientStore, check_limit
from prepkit.ranks.world import world

LOOK_S = 0.1
"""Seconds between two looks whether the main process is done."""

DONE = "done"
"""Written by the main process when it is done. Anything else is the exception that it raised."""


@contextmanager
def main_process_first(*, per_node: bool = False, timeout_s: float = 3600.0) -> Iterator[None]:
    """Inside, rank 0 goes first and the others follow when it is through; for downloads and caches on a shared disk.

    ``per_node``: the first process of each node goes first, for disks that are each node's own. Needs no process group,
    so that it may stand before ``apply``::

        with pk.processes.main_process_first():
            dataset = load_dataset("wikitext", "wikitext-2-raw-v1")

    What the first raises, or its end, is raised on those that wait for it as ``RankFailed``; likewise where it is not
    through after ``timeout_s`` seconds. The first waits for nobody once all ranks were started. Does nothing in a
    process on its own. Raises ``TypeError`` where ``timeout_s`` is no number, and ``per_node`` neither True nor False;
    ``ValueError`` where ``timeout_s`` is not above 0 and finite.
    """
    check_limit(timeout_s)
    if not isinstance(per_node, bool):
        raise TypeError(f"per_node={per_node!r:.60}: write True or False")
    met = _meeting(timeout_s)
    if met is None:
        yield
        return
    store, rank, world = met
    first = rank - launcher.local_rank() if per_node else 0
    number = PatientStore(store, timeout_s).add(f"main first of {rank}", 1)
    keys = PatientStore(PrefixStore(f"main first {number}/{first}", store), timeout_s)
    peers = Peers(keys, rank, world)
    if rank != first:
        _await(peers, first, timeout_s)
        yield
        return
    peers.sign()
    peers.beat()
    try:
        yield
    except BaseException as error:
        keys.set("verdict", json.dumps(f"{type(error).__name__}: {error}"))
        raise
    finally:
        peers.rest()
    keys.set("verdict", DONE)


def _await(peers: Peers, first: int, timeout_s: float) -> None:
    """Until the first is through. Raises ``RankFailed`` that names it where it will not be."""
    began = time.monotonic()
    while not peers.store.check(["verdict"]):
        for rank, how in peers.ended([first]):
            if not peers.store.check(["verdict"]):
                raise RankFailed(rank, f"rank {rank} of {peers.world} was to go first and was lost: {how}")
        if time.monotonic() > began + timeout_s:
            raise RankFailed(
                first, f"rank {first} of {peers.world} goes first and was not through in {timeout_s:.0f} s"
            )
        time.sleep(LOOK_S)
    verdict = peers.store.get("verdict")
    if verdict != DONE:
        raise RankFailed(first, f"rank {first} of {peers.world}, which goes first, failed: {json.loads(verdict)}")


def _meeting(timeout_s: float) -> tuple[Store, int, int] | None:
    """Store, rank and number of ranks; None for a process on its own, and in a fake group, which has no data."""
    ranks = world()
    if ranks.running:
        if not ranks.carries_data:
            return None
        return PrefixStore("prepkit main first", _get_default_store()), ranks.rank, ranks.size
    if launcher.processes() == 1:
        return None
    store, rank, size = rendezvous.meet(timeout_s)
    store.set_timeout(timedelta(seconds=timeout_s))
    return PrefixStore("main first", store), rank, size
