"""All ranks or none: what one rank fails at, every rank hears within seconds, wherever it is by then.

Ranks meet at the points that a plan's handlers name. At each of them one word is kept in the rendezvous store, and the
first word counts (``Store.compare_set``): the last rank to arrive writes that all are there, a rank that fails writes
why. A rank that waits in a collective has no eyes for the store; the failing one ends its process group after it has
written, the waiting one gets the error of a closed connection, reads the word, and reports that instead.
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

OK = "all are there"

LINGER_S = 5.0
"""Rank 0 often serves the store: after a failure it waits so long for the others to have read it."""


class RankFailed(RuntimeError):
    """Another rank could not go on, so this one did not either. ``rank`` is the first that failed; -1: not known."""

    def __init__(self, rank: int, what: str) -> None:
        self.rank = rank
        super().__init__(what)


@define(kw_only=True)
class RankGuard:
    """The ranks that apply a plan together, as one of them sees them."""

    store: Store
    rank: int
    world: int
    timeout_s: float
    place: Store | None = None
    """The store over which the process group is still to be started; None where one runs."""
    around: str = field(init=False)
    """Prefix of the keys of this apply. Each rank counts its applies in the store, so that a new one starts afresh."""
    met: int = field(default=0, init=False)
    """How many meetings this rank has been to."""
    inside: bool = field(default=False, init=False)
    """Whether others may be waiting in a collective that this rank has yet to enter or to leave."""
    ended: bool = field(default=False, init=False)
    """Whether the process group was ended, with its connections, so that nobody waits in vain."""
    over: Literal["", "well", "badly"] = field(default="", init=False)
    """Whether the apply has come to its end, and to which."""

    def __attrs_post_init__(self) -> None:
        self.around = f"{self.store.add(f'applies of {self.rank}', 1)}"

    def meet(self) -> None:
        """Returns when all ranks are here. Raises ``RankFailed`` when one has failed, or is not here in time."""
        key = f"{self.around}/{self.met}"
        self.met += 1
        try:
            self.store.set(f"{key}/{self.rank}", "here")
            if self.store.add(f"{key}/count", 1) == self.world:
                self.store.compare_set(f"{key}/word", "", OK)
            self.store.wait([f"{key}/word"], timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise RankFailed(-1, self._absent(key, error)) from error
        if (failed := self._read(f"{key}/word")) is not None:
            raise failed
        self.inside = True

    def hear(self, event: Event) -> None:
        """A step that begins is the rank's own affair until it meets the others: none waits for it in a collective."""
        if event.moment == "do":
            self.inside = False

    def tell(self, error: BaseException) -> BaseException:
        """Writes that this rank has failed, where no other has before; returns the failure that came first.

        Ends the process group, with its connections, if others may be waiting in a collective for this rank.
        """
        if self.over:
            return error
        self.over = "badly"
        if isinstance(error, Disagreement):  # every rank knows, and none of them waits
            self._linger()
            return error
        first = error if isinstance(error, RankFailed) and error.rank >= 0 else self._announce(error)
        if isinstance(first, RankFailed) and first is not error:
            first.__context__ = error
        if self.inside and dist.is_initialized():
            _end_group(error)
            self.ended = True
        self._linger()
        return first

    def _announce(self, error: BaseException) -> BaseException:
        word = json.dumps({"rank": self.rank, "what": f"{type(error).__name__}: {error}"})
        for number in (self.met - 1, self.met):  # the last meeting, if it did not come about; else the next
            if number < 0:
                continue
            key = f"{self.around}/{number}/word"
            try:
                self.store.compare_set(key, "", word)
                failed = self._read(key)
            except RuntimeError:  # the store is gone, and with it everybody who could hear
                return error
            if failed is not None:
                return error if failed.rank == self.rank else failed
        return error

    def _read(self, key: str) -> RankFailed | None:
        word = self.store.get(key).decode()
        if word == OK:
            return None
        said = json.loads(word)
        return RankFailed(said["rank"], f"rank {said['rank']} of {self.world} failed: {said['what']}")

    def _linger(self) -> None:
        heard = f"{self.around}/heard"
        try:
            if self.store.add(heard, 1) == self.world:
                self.store.set(f"{heard} by all", "")
            elif self.rank == 0:
                self.store.wait([f"{heard} by all"], timedelta(seconds=LINGER_S))
        except RuntimeError:  # not all came: they do something else, or have ended
            return

    def _absent(self, key: str, error: Exception) -> str:
        try:
            gone = [rank for rank in range(self.world) if not self.store.check([f"{key}/{rank}"])]
        except RuntimeError:
            return (
                f"the rendezvous store cannot be reached: {error}; the process that serves it, often rank 0, has ended"
            )
        who = ", ".join(map(str, gone[:8])) + (f" and {len(gone) - 8} more" if len(gone) > 8 else "")
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
class _Slot:
    """Where nested calls of ``together`` find the company that they share."""

    company: RankGuard | None = None


_around: ContextVar[_Slot | None] = ContextVar("_around", default=None)


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
    slot = _around.get() or _Slot()
    if slot.company is None or slot.company.over:
        slot.company = assemble(timeout_s)
    token = _around.set(slot)
    try:
        yield slot.company
    except BaseException as error:
        if slot.company is not None and slot.company.over == "well":  # what failed is on the way to the next apply
            slot.company = assemble(timeout_s)
        if slot.company is not None:
            slot.company.tell(error)
        raise
    finally:
        _around.reset(token)


def assemble(timeout_s: float) -> RankGuard | None:
    """The company of this process; None where it is alone: without a launcher, or in a fake group, without data.

    Waits for the other ranks where the group is still to be started; raises as ``launcher.meeting_place`` does.
    """
    if dist.is_initialized():
        if dist.get_world_size() == 1 or "fake" in str(dist.get_backend_config()):
            return None
        store = PrefixStore("prepkit", _get_default_store())
        return RankGuard(store=store, rank=dist.get_rank(), world=dist.get_world_size(), timeout_s=timeout_s)
    if launcher.processes() == 1:
        return None
    place, rank, world = launcher.meeting_place(timeout_s)
    store = PrefixStore("prepkit", place)
    return RankGuard(store=store, rank=rank, world=world, timeout_s=timeout_s, place=place)
