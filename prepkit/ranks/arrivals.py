"""Ranks of a script of anybody's, which come to the same place or do not: whoever waits names the others, and ends.

No collective is called before all are there, so that nobody is caught in one that another rank answers otherwise. What
each rank has done so far stands in the store of the script's own process group.

Ranks that send each other tensors come to a place one after the other, as the stages of a pipeline do: whoever waits
for one that waits for a tensor goes on, and one that has come to its end goes on until all have.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Thread
from typing import Any

from attrs import astuple, define, evolve, field, frozen
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, but not exported for checkers
from torch.distributed.distributed_c10d import _get_default_store  # torch has no public door to it

from prepkit.findings.text import count, spans
from prepkit.ranks import end_groups
from prepkit.ranks.peers import Peers
from prepkit.ranks.within import PatientStore, pause
from prepkit.ranks.world import world

SAID_S = 5.0
"""Seconds after which whoever waits says for whom."""
STILL_S = 120.0
"""Seconds without a call or a backward of a rank after which it is given up."""
AHEAD_S = 30.0
"""The same of a rank that has done more than this one, and so may wait for it in a collective."""
LOOK_S = 1.0
"""Seconds between two looks at what the others do, and after which who waits for a tensor says so."""
STANDS_S = 10.0
"""Seconds after which a rank is given up that stands still in a collective, while another one has come past it."""
ALL_STAND_S = 20.0
"""The same where every rank stands still in one."""
ANSWER_S = 30.0
"""Seconds that the store may take."""
VERDICT = "verdict"


class RanksApart(BaseException):
    """Another rank does not come; no ``except Exception`` of the script holds it up. ``str`` says which, and why."""


@frozen
class Reached:
    """What a rank has done."""

    calls: int = 0
    backwards: int = 0
    ended: str = ""
    """How its script has come to an end; empty: it goes on."""
    waits: bool = False
    """Whether it waits for another rank to send or to take a tensor."""
    alone: int = 0
    """Calls of a wrapper that was told to average nothing, as by ``no_sync()``."""
    skipped: int = 0
    """Steps that its scaler has left out."""
    steps: int = 0
    """Those that it has taken."""


@define
class Arrivals:
    """One rank among the others, from its first call or backward on in a process group that carries data."""

    gives_up: Callable[[str], object] | None = None
    """Is told, in another thread, why no rank will ever go on; None: nobody is."""
    done: Reached = field(factory=Reached, init=False)
    hands: bool = field(default=False, init=False)
    """Whether this rank has sent a tensor to one rank, or got one from it."""
    alone: bool = field(default=False, init=False)
    """Whether ``together`` has said that the others do not come."""
    _stood: bool = field(default=False, init=False)
    """Whether this rank stood still when it was last looked at."""
    _waiting: list[Thread] = field(factory=list, init=False)
    """Those in which this rank waits for another one."""
    _leaving: tuple[str, Callable[[], object]] | None = field(default=None, init=False)
    _peers: Peers | None = field(default=None, init=False)
    _process: int = field(factory=os.getpid, init=False)
    """A loader's worker, which calls modules too, is none of the ranks."""

    def calls(self, *, alone: bool = False) -> None:
        """Take note of a call of a model; ``alone``: of which a backward averages nothing."""
        self._tell(evolve(self.done, calls=self.done.calls + 1, alone=self.done.alone + alone))
        self._looks()

    def goes_backward(self) -> None:
        """Take note of a backward that begins."""
        self._tell(evolve(self.done, backwards=self.done.backwards + 1))
        self._looks()

    def scaled(self, scaler: Any, optimizer: Any) -> None:
        """A scaler has stepped, or has left the step out, as gradients of this rank are not finite."""
        if scaler.is_enabled() and any(map(float, scaler._found_inf_per_device(optimizer).values())):
            self._tell(evolve(self.done, skipped=self.done.skipped + 1))

    def steps(self) -> None:
        """Take note of a step that is over."""
        self._tell(evolve(self.done, steps=self.done.steps + 1))

    def ends(self, how: str) -> None:
        """The script of this rank has come to an end, or to something that ends it."""
        self._tell(evolve(self.done, ended=how))

    def stands(self, place: str, seconds: float) -> None:
        """Take note, in another thread, that this rank has stood still in a call for so long; ``place`` empty: not.

        Where every rank does, none will ever go on, which the first one says.
        """
        still = bool(place) and seconds > SAID_S
        if (not still and not self._stood) or self.hands or not world().running or "nccl" in world().backend:
            return
        with suppress(RuntimeError):
            if (peers := self._joined()) is None:
                return
            self._stood = still
            peers.store.set(f"stands/{peers.rank}", json.dumps((place, seconds)) if still else "")
            each = [_stands(peers, one) for one in range(peers.world if still and not peers.rank else 0)]
            if each and all(since > ALL_STAND_S for _, since in each):
                told = (f"rank {one} {_said(_read(peers, one))}, in {place}" for one, (place, _) in enumerate(each[:4]))
                peers.store.compare_set(VERDICT, "", f"Every rank waits for another one: {'; '.join(told)}")
                if self.gives_up is not None:
                    self.gives_up(peers.store.get(VERDICT))

    def _tell(self, done: Reached) -> None:
        if os.getpid() != self._process:
            return
        self.done = done
        if (peers := self._joined()) is not None:
            with suppress(RuntimeError):  # the store has gone with the rank that serves it
                peers.store.set(f"done/{peers.rank}", json.dumps(astuple(done)))

    def _joined(self) -> Peers | None:
        ranks = world()
        if self._peers is None and ranks.carries_data:
            store = PrefixStore("prepkit arrivals", _get_default_store())
            self._peers = Peers(PatientStore(store, ANSWER_S), ranks.rank, ranks.size)
            self._peers.sign()
        return self._peers

    def handed(self, work: Any, tensor: Tensor) -> Any:
        """Take note of a tensor that goes to one rank or comes from it; what is waited with, on a CPU."""
        self.hands = True
        return work if work is None or tensor.device.type != "cpu" else Handed(work, self)

    def until(self, waiting: Thread) -> None:
        """Return when a thread that waits for another rank has ended.

        It may never. Raises what ``leaves`` was given once all ranks have left, and ``RanksApart`` as ``meet``.
        """
        self._waiting = [*filter(Thread.is_alive, self._waiting), waiting]
        began = look = time.monotonic()
        while waiting.is_alive():
            waiting.join(pause(time.monotonic() - began))
            self._looks()
            if time.monotonic() > look + LOOK_S:
                look = time.monotonic()
                if not self.done.waits:
                    self._tell(evolve(self.done, waits=True))
                self._goes_on()
        if self.done.waits:
            self._tell(evolve(self.done, waits=False))

    def leaves(self, place: str, stop: Callable[[], object], *, last: bool = False) -> None:
        """Come to a place from which nothing more is looked at, and call ``stop`` there, which raises.

        Where the others wait for a tensor this rank goes on, and stops when all have come.
        """
        if not self.hands or self._leaving is not None or (peers := self._joined()) is None:
            self._looks() if self._leaving is not None else stop()
            return
        missing = self._wait(peers, place, last=last, goes_on=True)
        if missing:
            self._goes_on()
        self._leaving = place, stop
        self._looks()

    def _looks(self) -> None:
        if self._leaving is not None and (peers := self._joined()) is not None:
            place, stop = self._leaving
            if peers.store.check([f"{place}/{rank}" for rank in range(peers.world)]):
                self._leaving = None
                stop()

    def lets_go(self) -> None:
        """End the group where ranks have sent each other tensors, so that nobody waits for one when the process ends.

        Every rank calls it, once it needs no other.
        """
        if self.hands and world().running and "nccl" not in world().backend:
            end_groups.disconnect(None)
            for thread in self._waiting:
                thread.join(ANSWER_S)

    def together(self, place: str) -> bool:
        """Return whether every rank is here, as ``meet``; False where the others wait for this one to go on.

        All ranks get one answer, also those that come later.
        """
        if not self.hands or (peers := self._joined()) is None:
            self.meet(place)
            return True
        missing = self._wait(peers, place, last=False, goes_on=True)
        if missing:
            self._goes_on()
        peers.store.compare_set(f"how {place}", "", "alone" if missing else "together")
        self.alone = peers.store.get(f"how {place}") == "alone"
        return not self.alone

    def others_rest(self, place: str) -> bool:
        """Return whether no other rank has called a model, and each stands still in a call until this one comes there.

        As where this rank trains something by itself before all train, and not in a wrapper that is told to average
        nothing. Waits until that is so, or is not, as where one comes to the same place.
        """
        if self.hands or self.done.alone or (peers := self._joined()) is None or "nccl" in world().backend:
            return False
        began, others = time.monotonic(), [one for one in range(peers.world) if one != peers.rank]
        peers.store.set(f"{place} comes/{peers.rank}", "here")
        while time.monotonic() < began + STILL_S and next(peers.ended(others), None) is None:
            come = (peers.store.check([f"{place} comes/{one}"]) for one in others)
            if any(come) or any(_read(peers, one) != Reached() for one in others):
                break
            if all(_stands(peers, one)[0] for one in others):
                return bool(others)
            time.sleep(pause(time.monotonic() - began))
        return False

    def parts(self, why: str) -> None:
        """Raise ``RanksApart`` here, and on every rank that waits for this one."""
        if (peers := self._joined()) is not None:
            peers.store.compare_set(VERDICT, "", why)
            self._goes_on()

    def come(self, place: str, within_s: float) -> bool:
        """Say that this rank is here; return whether every rank is, after so many seconds at most."""
        if (peers := self._joined()) is None:
            return True
        began, everyone = time.monotonic(), [f"{place}/{one}" for one in range(peers.world)]
        peers.store.set(everyone[peers.rank], "here")
        while not (here := peers.store.check(everyone)) and time.monotonic() < began + within_s:
            time.sleep(pause(time.monotonic() - began))
        return here

    def all_come(self, place: str, elsewhere: str) -> bool:
        """Return True once every rank is at a place, or one has ended; False once one is ``elsewhere``.

        Where ranks send each other tensors, or one is given up, nothing is waited for.
        """
        if self.hands or (peers := self._joined()) is None:
            return True
        began, each = time.monotonic(), range(peers.world)
        peers.store.set(f"{place}/{peers.rank}", "here")
        while not peers.store.check([f"{place}/{one}" for one in each]):
            if any(peers.store.check([f"{elsewhere}/{one}"]) for one in each):
                return False
            if peers.store.check([VERDICT]) or any(_read(peers, one).ended for one in each):
                break
            time.sleep(pause(time.monotonic() - began))
        return True

    def wanted(self, place: str, wants: bool, end: str) -> bool:
        """Return whether any rank wants it, once all are here; ranks that have come to their ``end`` want nothing.

        Where ranks send each other tensors each goes by what it wants itself. Raises ``RanksApart`` as ``meet``.
        """
        if self.hands or (peers := self._joined()) is None:
            return wants
        peers.store.set(f"{place} wants/{peers.rank}", str(int(wants)))
        self.meet(place, last=True, end=end)
        keys = [f"{place} wants/{one}" for one in range(peers.world)]
        return any(peers.store.get(key) == "1" for key in keys if peers.store.check([key]))

    def meet(self, place: str, *, last: bool = False, end: str = "") -> None:
        """Return when every rank is here. ``place``: such as ``its first step``. ``last``: an ended script comes too.

        ``end``: a place at which a rank need not come here any more.
        Raises ``RanksApart`` on every rank that is here, or comes later, where one does not come.
        """
        if (peers := self._joined()) is None:
            return
        try:
            missing = self._wait(peers, place, last=last, end=end)
        except RuntimeError as gone:  # the store, with the rank that serves it
            raise RanksApart(self.verdict() or str(gone)) from gone
        if missing:
            self._goes_on()

    def _wait(self, peers: Peers, place: str, *, last: bool, goes_on: bool = False, end: str = "") -> list[int]:
        """Until all are there; else the ranks that were not when some were given up.

        ``goes_on``: or when all of those wait for a tensor, or one has gone on before.
        """
        store, began = peers.store, time.monotonic()
        seen: dict[int, tuple[Reached, float]] = {}
        store.set(f"{place}/{peers.rank}", "here")
        look, said = began, False
        places = [place, end] if end else [place]
        while missing := [
            one for one in range(peers.world) if not any(store.check([f"{each}/{one}"]) for each in places)
        ]:
            if store.check([VERDICT]) or (goes_on and store.check([f"how {place}"])):
                break
            if (now := time.monotonic()) > look:
                look = now + LOOK_S
                for one in missing:
                    done = _read(peers, one)
                    seen[one] = (done, now) if one not in seen or seen[one][0] != done else seen[one]
                if goes_on and all(seen[one][0].waits for one in missing):
                    break
                if not said and now > began + SAID_S:
                    said = True
                    sys.stderr.write(f"prepkit: {self._where(place, missing, seen)}; waiting\n")
                if why := next(self._lost(peers, seen, now, last=last), None):
                    store.compare_set(VERDICT, "", f"{self._where(place, missing, seen)}{why}")
            time.sleep(pause(now - began))
        return missing

    def _goes_on(self) -> None:
        """Raise ``RanksApart`` where the ranks have been given up."""
        if said := self.verdict():
            raise RanksApart(said)

    def verdict(self) -> str:
        """Why the ranks have been given up; empty: they have not been."""
        if self._peers is None:
            return ""
        try:
            return self._peers.store.get(VERDICT) if self._peers.store.check([VERDICT]) else ""
        except RuntimeError:
            return "The rank that serves the rendezvous store has ended: its output says why"

    def _lost(self, peers: Peers, seen: dict[int, tuple[Reached, float]], now: float, *, last: bool) -> Iterator[str]:
        """Yield why a rank will not come."""
        for rank, how in peers.ended(seen):
            yield f". Rank {rank}: {how}"
        for rank, (done, since) in seen.items():
            where, stood = _stands(peers, rank)
            if done.ended and not last:
                yield f". Rank {rank}: {done.ended}"
            elif stood > STANDS_S and now - since > SAID_S:  # what it said before this rank came may be over
                yield f". Rank {rank} has waited for other ranks for {stood:.0f} s, in {where}"
            elif now - since > (AHEAD_S if self._is_behind(done) else STILL_S):
                yield f". Rank {rank} has done nothing more for {now - since:.0f} s"

    def _is_behind(self, other: Reached) -> bool:
        return other.calls > self.done.calls or other.backwards > self.done.backwards

    def _where(self, place: str, missing: list[int], seen: dict[int, tuple[Reached, float]]) -> str:
        rank = 0 if self._peers is None else self._peers.rank
        known = {one: seen[one][0] for one in missing[:4] if one in seen}
        each = [f"rank {one} {_said(done)}" for one, done in {**known, rank: self.done}.items()]
        who = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {spans(tuple(missing))} have"
        return f"Rank {rank} has come to {place}, and {who} not: {', '.join(each)}"


@define(eq=False)
class Handed:
    """A tensor under way between two ranks, in the place of torch's ``Work``: who waits for it looks up meanwhile."""

    work: Any
    arrivals: Arrivals

    def wait(self, *given: Any, **named: Any) -> Any:
        """As of ``Work``. Raises what it raises."""
        answer: list[Any] = []

        def waits() -> None:
            try:
                answer.extend((self.work.wait(*given, **named), None))
            except BaseException as error:  # which is raised where the program waits
                answer.extend((None, error))

        thread = Thread(target=waits, daemon=True)
        thread.start()
        self.arrivals.until(thread)
        result, error = answer
        if error is not None:
            raise error
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


def _said(done: Reached) -> str:
    alone = f" ({done.alone} inside no_sync())" * bool(done.alone)
    left = f", and its GradScaler has left out {count(done.skipped, 'step')}" * bool(done.skipped)
    each = [f"called a model {count(done.calls, 'time')}{alone}", f"gone backward {count(done.backwards, 'time')}"]
    each += [f"stepped {count(done.steps, 'time')}"] * bool(done.steps)
    return f"has {', '.join(each[:-1])} and {each[-1]}{left}"


def _read(peers: Peers, rank: int) -> Reached:
    key = f"done/{rank}"
    return Reached(*json.loads(peers.store.get(key))) if peers.store.check([key]) else Reached()


def _stands(peers: Peers, rank: int) -> tuple[str, float]:
    """The call in which a rank stands still, and for how many seconds it has."""
    key = f"stands/{rank}"
    said = peers.store.get(key) if peers.store.check([key]) else ""
    where, seconds = json.loads(said) if said else ("", 0.0)
    return where, seconds
