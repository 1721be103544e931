"""Waits that end: calls into torch that may never return, with a limit of their own.

The client of a rendezvous store waits without a limit where the process that serves it has stopped without ending
(torch ``TCPStore``, a ``recv`` without time-out). The call is left to a thread, which stays behind where it does not
return.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from attrs import define, field
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not exported for checkers

T = TypeVar("T")
"""The return type of the call."""

_Answer = tuple[Any, BaseException | None]
"""The return value of a call, or the exception that it raised."""


class NoAnswer(RuntimeError):
    """A call that did not return in time."""


LOOK_S = 0.5
"""Seconds between two calls of ``meanwhile``."""


@define(eq=False, repr=False)
class _Caller:
    """A thread that makes calls for others, one at a time."""

    calls: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[_Answer]]] = field(factory=SimpleQueue)

    def __attrs_post_init__(self) -> None:
        threading.Thread(target=self._work, name="prepkit: waits that end", daemon=True).start()

    def _work(self) -> None:
        while True:
            call, answers = self.calls.get()
            answer: _Answer
            try:
                answer = call(), None
            except BaseException as error:  # carried over to the thread that waits
                answer = None, error
            answers.put(answer)
            del call, answers, answer  # what they hold goes now, not at the next call


_idle: list[_Caller] = []
"""Those that have answered: to start a thread for each call would cost as much as the call."""
os.register_at_fork(after_in_child=_idle.clear)


def within(seconds: float, act: Callable[[], T], what: str, meanwhile: Callable[[], object] | None = None) -> T:
    """Call ``act`` and return or raise as it does; raise ``NoAnswer`` about ``what`` if it does neither in time.

    ``meanwhile`` is called every ``LOOK_S``; what it raises ends the wait. ``act`` runs in another thread.
    """
    try:
        caller = _idle.pop()
    except IndexError:
        caller = _Caller()
    answers: SimpleQueue[_Answer] = SimpleQueue()
    caller.calls.put((act, answers))
    value, error = _answer(answers, seconds, what, meanwhile)
    _idle.append(caller)  # one that does not answer is left to itself
    if error is not None:
        raise error
    answer: T = value
    return answer


def _answer(
    answers: SimpleQueue[_Answer], seconds: float, what: str, meanwhile: Callable[[], object] | None
) -> _Answer:
    until = time.monotonic() + seconds
    while True:
        left = until - time.monotonic()
        try:
            return answers.get(timeout=max(left if meanwhile is None else min(left, LOOK_S), 0.0))
        except Empty:
            if time.monotonic() >= until:
                raise NoAnswer(f"{what}: no answer within {seconds:.0f} s") from None
        if meanwhile is not None:
            meanwhile()


def check_limit(seconds: object) -> None:
    """Raises ``TypeError`` for what is no number of seconds, and ``ValueError`` for one that no wait can have."""
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        raise TypeError(f"timeout_s={seconds!r:.60} is no number; write seconds, such as timeout_s=600.0")
    if not 0 < seconds <= threading.TIMEOUT_MAX:  # false for nan; torch takes 0 for no limit at all
        raise ValueError(f"timeout_s={seconds!r:.60}: write seconds above 0, such as timeout_s=600.0")


def own_connection(store: Store) -> Store | None:
    """The same store over another connection: one waits while a call goes on. None before torch 2.9, which has none."""
    clone = getattr(store, "clone", None)
    return None if clone is None else clone()


@define(eq=False, repr=False)
class PatientStore:
    """A rendezvous store whose every answer comes within ``limit_s`` seconds, or ``NoAnswer``.

    After the first answer that did not come no other is waited for: the stopped thread keeps the connection.
    """

    store: Store
    limit_s: float
    _silent: bool = field(default=False, init=False)

    def set(self, key: str, value: str) -> None:
        """Writes."""
        self._ask("set", key, value)

    def get(self, key: str) -> str:
        """The value of a key that is there."""
        value: bytes = self._ask("get", key)
        return value.decode()

    def add(self, key: str, number: int) -> int:
        """Adds to the number of a key that begins at 0, and returns it."""
        count: int = self._ask("add", key, number)
        return count

    def compare_set(self, key: str, old: str, new: str) -> None:
        """Writes ``new`` where the key has the value ``old``; ``""``: is not there."""
        self._ask("compare_set", key, old, new)

    def check(self, keys: Sequence[str]) -> bool:
        """True if all keys are there."""
        there: bool = self._ask("check", list(keys))
        return there

    def delete(self, key: str) -> None:
        """Takes a key away, whether or not it is there."""
        self._ask("delete_key", key)

    def _ask(self, verb: str, *args: Any) -> Any:
        if self._silent:
            raise NoAnswer("the rendezvous store has not answered before")
        try:
            return within(self.limit_s, lambda: getattr(self.store, verb)(*args), "the rendezvous store")
        except NoAnswer:
            self._silent = True
            raise


FIRST_S = 0.0002
LONGEST_S = 0.1


def pause(waited_s: float) -> float:
    """A tenth of what was waited so far, in seconds: so much at most is lost once all are there.

    No shorter than 0.2 ms, and no longer than ``LONGEST_S``: thousands of ranks may be asking one store.

    >>> pause(0.0), pause(0.2), pause(600.0)
    (0.0002, 0.02, 0.1)
    """
    return min(max(FIRST_S, waited_s / 10), LONGEST_S)
