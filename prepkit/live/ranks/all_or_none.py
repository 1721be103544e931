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

import gc
import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from attrs import define, field
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, but not exported for checkers
from torch.distributed.distributed_c10d import (  # torch has no public door to either
    _abort_process_group,
    _get_default_store,
)

from prepkit.live.interpreter import Event
from prepkit.live.ranks import launcher
from prepkit.live.ranks.agree import Disagreement

ALL_THERE = "all are there"
"""The verdict of a barrier that every rank has reached. Any other is the failure of one rank, as JSON."""

GRACE_S = 5.0
"""Rank 0 often serves the store: after a failure it waits so long for the others to have read the verdict."""


class RankFailed(RuntimeError):
    """Another rank could not go on, so this one did not either. ``rank`` is the first that failed; -1: not known."""

    def __init__(self, rank: int, what: str) -> None:
        self.rank = rank
        super().__init__(what)


@define(kw_only=True)
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
    barriers: int = field(default=0, init=False)
    """How many barriers this rank has entered; the next one's number."""
    with_others: bool = field(default=False, init=False)
    """Whether others may be waiting in a collective that this rank has yet to enter or to leave."""
    group_ended: bool = field(default=False, init=False)
    """Whether this rank ended the process group, with its connections, so that nobody waits in vain."""
    outcome: Literal["", "well", "badly"] = field(default="", init=False)
    """How the apply has ended; empty while it goes on."""

    def __attrs_post_init__(self) -> None:
        self.prefix = f"{self.store.add(f'applies of {self.rank}', 1)}"

    def barrier(self) -> None:
        """Returns when all ranks are here. Raises ``RankFailed`` when one has failed, or is not here in time."""
        key = f"{self.prefix}/{self.barriers}"
        self.barriers += 1
        try:
            self.store.set(f"{key}/{self.rank}", "here")
            if self.store.add(f"{key}/count", 1) == self.world:
                self.store.compare_set(f"{key}/verdict", "", ALL_THERE)
            self.store.wait([f"{key}/verdict"], timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise RankFailed(-1, self._who_is_missing(key, error)) from error
        if (failure := self._failure(f"{key}/verdict")) is not None:
            raise failure
        self.with_others = True

    def on_event(self, event: Event) -> None:
        """Listens to the interpreter: a step that begins is the rank's own affair until it enters a barrier."""
        if event.phase == "do":
            self.with_others = False

    def report_failure(self, error: BaseException) -> BaseException:
        """Writes that this rank has failed, unless another has before; returns the failure that came first.

        Ends the process group, with its connections, if others may be waiting in a collective for this rank. Only the
        first call of an apply reports; later ones return ``error`` as it is.
        """
        if self.outcome:
            return error
        self.outcome = "badly"
        if isinstance(error, Disagreement):  # every rank raises it, and none of them waits
            self._wait_for_readers()
            return error
        first = error if isinstance(error, RankFailed) and error.rank >= 0 else self._write_verdict(error)
        if isinstance(first, RankFailed) and first is not error:
            first.__context__ = error
        if self.with_others and dist.is_initialized():
            _end_group(error)
            self.group_ended = True
        self._wait_for_readers()
        return first

    def _write_verdict(self, error: BaseException) -> BaseException:
        """The failure that counts: ``error`` where its verdict was the first, else that of the rank before it."""
        verdict = json.dumps({"rank": self.rank, "what": f"{type(error).__name__}: {error}"})
        for number in (self.barriers - 1, self.barriers):  # the last barrier, if not all came to it; else the next
            if number < 0:
                continue
            key = f"{self.prefix}/{number}/verdict"
            try:
                self.store.compare_set(key, "", verdict)
                failure = self._failure(key)
            except RuntimeError:  # the store is gone, and with it everybody who could read there
                return error
            if failure is not None:
                return error if failure.rank == self.rank else failure
        return error

    def _failure(self, key: str) -> RankFailed | None:
        """What the verdict says; None: all are there."""
        verdict = self.store.get(key).decode()
        if verdict == ALL_THERE:
            return None
        failure = json.loads(verdict)
        return RankFailed(failure["rank"], f"rank {failure['rank']} of {self.world} failed: {failure['what']}")

    def _wait_for_readers(self) -> None:
        """Rank 0 stays until every rank knows of the failure, at most ``GRACE_S``; the others only say that they do."""
        key = f"{self.prefix}/heard"
        try:
            if self.store.add(key, 1) == self.world:
                self.store.set(f"{key} by all", "")
            elif self.rank == 0:
                self.store.wait([f"{key} by all"], timedelta(seconds=GRACE_S))
        except RuntimeError:  # not all came: they do something else, or have ended
            return

    def _who_is_missing(self, key: str, error: Exception) -> str:
        try:
            missing = [rank for rank in range(self.world) if not self.store.check([f"{key}/{rank}"])]
        except RuntimeError:
            return (
                f"the rendezvous store cannot be reached: {error}; the process that serves it, often rank 0, has ended"
            )
        who = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        return f"not all {self.world} ranks came within {self.timeout_s:.0f} s; missing: {who}; their logs say why"


def _end_group(error: BaseException | None) -> None:
    """Closes this rank's connections: gloo's ``abort`` closes none (torch 2.13), the end of the group's object does."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)  # they hold half-made wrappers, and these hold the group
        error = error.__cause__ or error.__context__
    if "nccl" in str(dist.get_backend_config()):
        _abort_process_group()  # its kernels would keep an orderly end waiting
    else:
        dist.destroy_process_group()
    gc.collect()  # a half-made DistributedDataParallel refers to itself


@define
class _Shared:
    """Where nested calls of ``together`` find the guard that they share."""

    guard: RankGuard | None = None


_shared: ContextVar[_Shared | None] = ContextVar("_shared", default=None)


@contextmanager
def together(timeout_s: float = 600.0) -> Iterator[RankGuard | None]:
    """All ranks or none: what this rank raises inside ends the ``apply`` of every other one within seconds.

    Put it around everything that leads to ``apply``: reading the config, building model and plan::

        with pk.together():
            plan = pk.build_plan(cfg, make_model(), optimizer=optimizer)
            ready = pk.apply(plan)

    The other ranks raise ``ApplyHalted`` with a ``RankFailed`` that names this rank and what it raised. ``apply`` does
    the same by itself for what happens inside it. Does nothing in a process on its own.
    """
    shared = _shared.get() or _Shared()
    if shared.guard is None or shared.guard.outcome:
        shared.guard = rank_guard(timeout_s)
    token = _shared.set(shared)
    try:
        yield shared.guard
    except BaseException as error:
        if shared.guard is not None and shared.guard.outcome == "well":  # what failed is on the way to the next apply
            shared.guard = rank_guard(timeout_s)
        if shared.guard is not None:
            shared.guard.report_failure(error)
        raise
    finally:
        _shared.reset(token)


def rank_guard(timeout_s: float) -> RankGuard | None:
    """The guard of this process; None where it is alone: without a launcher, or in a fake group, without data.

    Waits for the other ranks where the group is still to be started; raises as ``launcher.meeting_place`` does.
    """
    if dist.is_initialized():
        if dist.get_world_size() == 1 or "fake" in str(dist.get_backend_config()):
            return None
        store = PrefixStore("prepkit", _get_default_store())
        return RankGuard(store=store, rank=dist.get_rank(), world=dist.get_world_size(), timeout_s=timeout_s)
    if launcher.processes() == 1:
        return None
    rendezvous, rank, world = launcher.meeting_place(timeout_s)
    store = PrefixStore("prepkit", rendezvous)
    return RankGuard(store=store, rank=rank, world=world, timeout_s=timeout_s, rendezvous=rendezvous)
