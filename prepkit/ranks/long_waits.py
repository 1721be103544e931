"""Warn, once, on a rank that waits long inside a call, where the other ranks are.

A thread of each rank writes into the rendezvous store which call of the run it is in, or made last. Where its own is
the same for a minute, it reads those of the others: where they are elsewhere, this one may wait for ever.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

from attrs import asdict, define, frozen
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not exported for checkers

from prepkit.findings import Finding
from prepkit.ranks.peers import Peers
from prepkit.ranks.within import own_connection
from prepkit.rules import found

Report = Callable[[tuple[Finding, ...]], None]

LOOK_S = 10.0
"""Seconds between two looks; what is read of another rank is at most so old."""

LONG_S = 60.0
"""Seconds inside one call after which the others are looked at."""

MOST = 64
"""How many of the ranks that follow in number are looked at."""

ENDS_S = 2.0
"""How long the end of the process waits for the thread: one that writes then would abort it."""


@frozen(kw_only=True)
class Doing:
    """Where a rank is."""

    call: str
    """Such as ``ready.save()``."""
    inside: bool
    """True if it is still in that call."""


@define(eq=False, repr=False)
class LongWaits:
    """The thread of one rank; it ends with ``stop``, with this object, and with the process."""

    thread: threading.Thread
    end: Callable[[], None]
    """Ends the thread. The end of the process calls it as well, and holds nothing else of this object."""

    def stop(self) -> None:
        """Ends the thread."""
        self.end()
        atexit.unregister(self.end)


def tell_long_waits(peers: Peers, report: Report) -> LongWaits:
    """Begin to watch the calls of a run with these ranks, until the object that is returned ends."""
    over = threading.Event()
    thread = threading.Thread(target=_look_again, args=(peers, over, report), name="prepkit: long waits", daemon=True)
    waits = LongWaits(thread, partial(_end, over, thread))
    atexit.register(waits.end)
    weakref.finalize(waits, over.set).atexit = False
    thread.start()
    return waits


def _end(over: threading.Event, thread: threading.Thread) -> None:
    over.set()
    thread.join(ENDS_S)


def _look_again(peers: Peers, over: threading.Event, report: Report) -> None:
    told = 0
    with suppress(RuntimeError):  # the store has gone, and with it everybody who could read there
        store = own_connection(peers.store.store)  # torch before 2.9 gives none, and nothing is reported
        while store is not None and not over.wait(LOOK_S):
            told = _look(peers, store, told, report)


def _look(peers: Peers, store: Store, told: int, report: Report) -> int:
    """Writes where this rank is, and says once of each of its calls that the others are elsewhere."""
    number, entered = peers.calls, peers.entered
    own = Doing(call=peers.last_call, inside=entered is not None)
    store.set(f"doing/{peers.rank}", json.dumps(asdict(own)))
    waited = 0.0 if entered is None else time.monotonic() - entered
    if waited < LONG_S or told == number:
        return told
    elsewhere = {rank: doing for rank, doing in _others(peers, store) if doing != own}
    if elsewhere:
        what = f"it has been in {own.call} for {waited:.0f} s, while {in_words(elsewhere.items())}"
        report((found("run.rank-waits", f"rank {peers.rank}", what),))
    return number


def _others(peers: Peers, store: Store) -> Iterable[tuple[int, Doing]]:
    for ahead in range(1, min(peers.world, MOST + 1)):
        rank = (peers.rank + ahead) % peers.world
        if store.check([f"doing/{rank}"]):
            yield rank, Doing(**json.loads(store.get(f"doing/{rank}")))


def in_words(elsewhere: Iterable[tuple[int, Doing]]) -> str:
    """Return which ranks are where.

    >>> save, step = Doing(call="ready.save()", inside=True), Doing(call="ready.step()", inside=False)
    >>> in_words([(1, save), (2, step), (3, step)])
    'rank 1 is in ready.save(), and ranks 2, 3 have returned from ready.step()'
    """
    ranks: dict[Doing, list[int]] = {}
    for rank, doing in elsewhere:
        ranks.setdefault(doing, []).append(rank)
    return ", and ".join(
        f"rank{'s' * (len(at) > 1)} {', '.join(map(str, at[:8]))}{', …' * (len(at) > 8)} {_verb(doing, len(at))}"
        for doing, at in ranks.items()
    )


def _verb(doing: Doing, many: int) -> str:
    if doing.inside:
        return f"{'is' if many == 1 else 'are'} in {doing.call}"
    return f"{'has' if many == 1 else 'have'} returned from {doing.call or 'apply'}"
