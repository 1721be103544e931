"""All ranks or none around an apply, and the main process before the others: both wait for nobody who is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta

from attrs import define
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, but not exported for checkers
from torch.distributed.distributed_c10d import _get_default_store  # torch has no public door to it

from prepkit.ranks import launcher, rendezvous
from prepkit.ranks.all_or_none import RankGuard
from prepkit.ranks.peers import Peers, RankFailed
from prepkit.ranks.within import PatientStore, check_limit
from prepkit.ranks.world import world


@define(eq=False, repr=False)
class _Shared:
    """Where nested calls of ``together`` find the guard that they share."""

    guard: RankGuard | None = None


_shared: ContextVar[_Shared | None] = ContextVar("_shared", default=None)


@contextmanager
def together(timeout_s: float = 600.0) -> Iterator[RankGuard | None]:
    """All ranks or none: what this rank raises inside ends the ``apply`` of every other one within seconds.

    Put it around everything that leads to ``apply``: reading the config, building model and plan::

        with pk.processes.together():
            plan = pk.build_plan(cfg, make_model(), optimizer=optimizer)
            ready = pk.apply(plan)

    The other ranks raise ``ApplyHalted`` with a ``RankFailed`` that names this rank and what it raised. ``apply`` does
    the same by itself for what happens inside it. Where training stands inside as well, ``RankFailed`` that names the
    rank is raised in the place of torch's error about a closed connection. Does nothing in a process on its own.
    """
    shared = _shared.get() or _Shared()
    if shared.guard is None or shared.guard.outcome:
        shared.guard = rank_guard(timeout_s)
    token = _shared.set(shared)
    try:
        yield shared.guard
    except BaseException as error:
        if shared.guard is not None and shared.guard.outcome == "well":  # what failed is on the way to the next apply
            if (lost := shared.guard.peers.lost(error)) is not None:  # or in training, and nobody is there to be told
                raise lost from error
            shared.guard = rank_guard(timeout_s)
        if shared.guard is not None:
            shared.guard.report_failure(error)
        raise
    finally:
        _shared.reset(token)


def rank_guard(timeout_s: float) -> RankGuard | None:
    """The guard of this process; None where it is alone: without a launcher, or in a fake group, without data.

    Waits for the other ranks where the group is still to be started; raises as ``rendezvous.meet`` does.
    """
    met = _met(timeout_s)
    if met is None:
        return None
    store, rank, size = met
    before = None if world().running else store
    return RankGuard(store=store, rank=rank, world=size, timeout_s=timeout_s, rendezvous=before)


def _met(timeout_s: float) -> tuple[Store, int, int] | None:
    """Store, rank and number of ranks; None for a process on its own, and in a fake group, which has no data."""
    ranks = world()
    if ranks.running:
        return (PrefixStore("prepkit", _get_default_store()), ranks.rank, ranks.size) if ranks.carries_data else None
    return None if launcher.processes() == 1 else rendezvous.meet(timeout_s)


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
    met = _met(timeout_s)
    if met is None:
        yield
        return
    store, rank, size = met
    if not world().running:
        store.set_timeout(timedelta(seconds=timeout_s))
    store = PrefixStore("main first", store)
    first = rank - launcher.local_rank() if per_node else 0
    number = PatientStore(store, timeout_s).add(f"main first of {rank}", 1)
    keys = PatientStore(PrefixStore(f"main first {number}/{first}", store), timeout_s)
    peers = Peers(keys, rank, size)
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
