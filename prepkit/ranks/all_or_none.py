"""All ranks or none: what one rank fails at, every rank hears within seconds, wherever it is by then.

Ranks meet at barriers, at the points that a plan's handlers name (``target.together``). A barrier is a few keys in the
rendezvous store, outside any collective; the one that counts is its verdict, which is written once
(``Store.compare_set``): the last rank to arrive writes that all are there, a rank that fails writes why. A rank that
waits in a collective has no eyes for the store; the failing one therefore ends its process group after it has written,
the waiting one gets the error of a closed connection, reads the verdict, and reports that in its place.

One rank, from the beginning of an apply to its outcome::

                      a step begins: on_event("do")
            +-----------------------------------------------+
            v                                               |
    +---------------+  barrier()  +---------+  all      +---+--------------+  last step done
    |  on its own   |------------>|  waits  |---------->| with the others  |------------------> outcome "well"
    +---------------+             +---------+  are      +------------------+
            |                          |       there        |    collectives happen in this state, and in no other
            | raises                   | another rank's     | raises
            |                          | verdict; or not    |
            |                          | all came in time   |
            v                          v                    v
    +----------------------------------------------------------------------+
    | report_failure(): writes its verdict, or reads that of a rank that   |
    | failed before; where it came from "with the others" it also ends the |-----> outcome "badly": this rank raises the
    | process group, and whoever waits there comes here in turn            |       failure that was the first of all
    +----------------------------------------------------------------------+

A rank on its own is waited for by nobody but in the next barrier, where its verdict will be read; so its process group
is left alone. The verdict is written under the last barrier if that one has none yet, else under the next one.
"""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Literal

from attrs import define, field
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, but not exported for checkers

from prepkit.interpreter import Event
from prepkit.ranks import end_groups, rendezvous
from prepkit.ranks.agree import Disagreement
from prepkit.ranks.peers import Peers, RankFailed, lost_connection
from prepkit.ranks.within import LONGEST_S, PatientStore, own_connection, pause, within
from prepkit.ranks.world import world

ALL_THERE = "all are there"
"""The verdict of a barrier that every rank has reached. Any other is the failure of one rank, as JSON."""

GRACE_S = 5.0
"""Rank 0 often serves the store: after a failure it waits so long for the others to have read the verdict."""


WATCHED = 8
"""How many ranks that follow in number a waiting rank looks after: most are on its machine, where it sees their end."""

LOOK_S = 1.0
"""Seconds between two looks at them."""


@define(kw_only=True, eq=False, repr=False)
class RankGuard:
    """Guards one apply on one rank: brings the ranks together at barriers, and tells them when one has failed.

    Every rank has its own; they talk over ``store``. For the states that a rank goes through see the module.
    """

    store: Store
    rank: int
    world: int
    """Number of ranks."""
    timeout_s: float
    """How long a barrier waits for a rank that does not come."""
    rendezvous: Store | None = None
    """The store over which the process group is still to be started; None where one runs."""
    prefix: str = field(init=False)
    """Of the keys of this apply. Each rank counts its applies in the store, so that a new one starts afresh."""
    keys: PatientStore = field(init=False)
    """The part of the store under ``prefix``."""
    peers: Peers = field(init=False)
    """The other ranks, while this apply goes on and afterwards."""
    barriers: int = field(default=0, init=False)
    """How many barriers this rank has entered; the next one's number."""
    with_others: bool = field(default=False, init=False)
    """True if others may be waiting in a collective that this rank has yet to enter or to leave."""
    group_ended: bool = field(default=False, init=False)
    """True if this rank ended the process group, with its connections, so that nobody waits in vain."""
    outcome: Literal["", "well", "badly"] = field(default="", init=False)
    """How the apply has ended; empty while it goes on."""

    def __attrs_post_init__(self) -> None:
        self.prefix = str(PatientStore(self.store, self.timeout_s).add(f"applies of {self.rank}", 1))
        self.keys = PatientStore(PrefixStore(self.prefix, self.store), self.timeout_s)
        self.peers = Peers(self.keys, self.rank, self.world)
        self.peers.sign()
        self.peers.beat()
        if self.rendezvous is not None:  # the keys of a group that has ended would lead the next one astray
            connect = partial(own_connection, self.rendezvous)
            own = within(self.timeout_s, connect, "the rendezvous store")
            self.rendezvous = PrefixStore(f"group of {self.prefix}", own or self.rendezvous)

    def barrier(self) -> None:
        """Returns when all ranks are here. Raises ``RankFailed`` when one has failed or ended, or is not in time."""
        key = str(self.barriers)
        self.barriers += 1
        try:
            self._wait_for_verdict(key)
            failure = self._failure(f"{key}/verdict")
        except RankFailed:
            raise
        except RuntimeError as error:
            raise RankFailed(-1, self._unreachable(error)) from error
        if failure is not None:
            raise failure
        self.with_others = True

    def _wait_for_verdict(self, key: str) -> None:
        """Says that this rank is here, and waits until the barrier has a verdict."""
        self.keys.set(f"{key}/{self.rank}", "here")
        if self.keys.add(f"{key}/count", 1) == self.world:
            self.keys.compare_set(f"{key}/verdict", "", ALL_THERE)
        began = time.monotonic()
        look_again = began + LOOK_S
        while not self.keys.check([f"{key}/verdict"]):
            now = time.monotonic()
            if now > look_again:
                look_again = now + LOOK_S
                self._look(key, late=now > began + self.timeout_s)
            time.sleep(pause(now - began))

    def watch(self) -> None:
        """Raises ``RankFailed`` where a rank has failed or ended since the last barrier: for waits elsewhere."""
        key = f"{self.barriers}/verdict"
        if not hasattr(self.store, "clone"):  # the one connection waits for what is watched
            return
        for rank, how in self.peers.ended(self._following()[:WATCHED]):
            self.keys.compare_set(key, "", json.dumps({"rank": rank, "what": how}))
            break
        if self.keys.check([key]) and (failure := self._failure(key)) is not None:
            raise failure

    def _following(self) -> list[int]:
        return [(self.rank + ahead) % self.world for ahead in range(1, self.world)]

    def _look(self, key: str, *, late: bool) -> None:
        """Gives the barrier a verdict where a rank that is missing has ended; raises ``RankFailed`` when it is late."""
        watched = sorted(self._following()) if late else self._following()[:WATCHED]
        missing = [rank for rank in watched if not self.keys.check([f"{key}/{rank}"])]
        for rank, how in self.peers.ended(missing):
            verdict = json.dumps({"rank": rank, "what": how})
            self.keys.compare_set(f"{key}/verdict", "", verdict)
            return
        if late and not missing:  # one has ended between saying that it is here and being counted
            self.keys.compare_set(f"{key}/verdict", "", ALL_THERE)
        elif late:
            only = missing[0] if len(missing) == 1 else -1
            raise RankFailed(only, rendezvous.late(missing, self.world, self.timeout_s))

    def on_event(self, event: Event) -> None:
        """Listens to the interpreter: a step that begins is the rank's own affair until it enters a barrier."""
        if event.phase == "do":
            self.with_others = False

    def report_success(self) -> Peers:
        """All ranks are done with the apply. Returns them, for whoever loses one of them later."""
        self.outcome = "well"
        self.peers.settle()
        self.peers.read_signs()
        return self.peers

    def report_failure(self, error: BaseException) -> BaseException:
        """Writes that this rank has failed, unless another has before; returns the failure that came first.

        Ends the process group, with its connections, if others may be waiting in a collective for this rank. Only the
        first call of an apply reports; later ones return ``error`` as it is.
        """
        if self.outcome:
            return error
        self.outcome = "badly"
        self.peers.rest()
        if isinstance(error, Disagreement):  # every rank raises it, and none of them waits
            self._wait_for_readers()
            return error
        first = error if isinstance(error, RankFailed) and error.rank >= 0 else self._write_verdict(error)
        if isinstance(first, RankFailed) and first is not error:
            first.__context__ = error
        if self.with_others and world().running:
            end_groups.disconnect(error)
            self.group_ended = True
        self._wait_for_readers()
        return first

    def _write_verdict(self, error: BaseException) -> BaseException:
        """The failure that counts: ``error`` where its verdict was the first, else that of the rank before it.

        A rank that fails because the connection to another is lost looks for that one first, and reports it instead.
        """
        what = f"{type(error).__name__}: {error}"
        told = {"rank": self.rank, "what": what}
        if self.with_others and lost_connection(error) and (lost := self._wait_for_culprit(error)) is not None:
            told, error = {"rank": lost.rank, "what": str(lost)}, lost
        for number in (self.barriers - 1, self.barriers):  # the last barrier, if not all came to it; else the next
            if number < 0:
                continue
            key = f"{number}/verdict"
            try:
                self.keys.compare_set(key, "", json.dumps(told))
                failure = self._failure(key)
            except RuntimeError:  # the store is gone, and with it everybody who could read there
                return error
            if failure is not None:
                return error if failure.rank == told["rank"] else failure
        return error

    def _wait_for_culprit(self, error: BaseException) -> RankFailed | None:
        """The rank that has ended; or the rank that failed first, where one reports why."""
        try:
            if self.keys.check([f"{self.barriers}/verdict"]):
                return None
        except RuntimeError:
            return self.peers.lost(error)
        lost = self.peers.lost(error)
        return lost if lost is not None and lost.rank >= 0 else None

    def _failure(self, key: str) -> RankFailed | None:
        """The failure in the verdict; None: all are there."""
        verdict = self.keys.get(key)
        if verdict == ALL_THERE:
            return None
        failure = json.loads(verdict)
        return RankFailed(failure["rank"], f"rank {failure['rank']} of {self.world} failed: {failure['what']}")

    def _wait_for_readers(self) -> None:
        """Rank 0 stays until every rank knows of the failure, at most ``GRACE_S``; the others only say that they do."""
        until = time.monotonic() + GRACE_S
        try:
            heard = self.keys.add("heard", 1)
            while self.rank == 0 and heard < self.world and time.monotonic() < until:
                time.sleep(LONGEST_S)
                heard = self.keys.add("heard", 0)
        except RuntimeError:  # not all came: they do something else, or have ended
            return

    def _unreachable(self, error: Exception) -> str:
        what = "the rendezvous store cannot be reached; the process that serves it, often rank 0, has ended or stopped"
        return f"{what}: {error}"
