"""Which backwards have gone into the gradients that an optimizer is about to step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import nsmallest
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from prepkit.auditing.course import SAMPLED, memory_of
from prepkit.auditing.running import alive
from prepkit.objects.local_part import local
from prepkit.observe.prepared.around import (
    Line,
    around_calls,
    frames_above,
    line_of_program,
    lines_of_program,
    loops_have,
)

MOST = 512
"""Backwards that are followed."""


@frozen(eq=False)
class _Went:
    """One backward."""

    line: str
    stands: tuple[Line, ...]


@frozen(eq=False)
class _Turn:
    """One step: of which optimizer, behind how many backwards, and those that it stepped."""

    optimizer: weakref.ref[Any]
    at: int
    parts: frozenset[int]
    line: str


@define(eq=False)
class _Entry:
    """What has gone into one gradient since it was cleared."""

    param: Tensor
    memory: Any = None
    parts: list[int] = field(factory=list)

    def looks(self) -> None:
        """Forgets what somebody has cleared or put there."""
        now, before = memory_of(self.param), self.memory
        if now != before:
            elsewhere = now is None or before is None or now[:2] != before[:2]
            zero = self.param.grad is None or not local(self.param.grad).any()
            self.parts = [] if elsewhere or zero else self.parts
        self.memory = now


@define(eq=False)
class Ledger:
    """Listens inside ``on()``; a few small parameters of each optimizer are followed."""

    _went: list[_Went] = field(factory=list)
    _turns: list[_Turn] = field(factory=list)
    _entries: weakref.WeakKeyDictionary[Any, list[_Entry]] = field(factory=weakref.WeakKeyDictionary)
    _known: weakref.WeakSet[Any] = field(factory=weakref.WeakSet)
    """Optimizers."""
    stale: tuple[tuple[str, str], ...] = ()
    """As in ``WindowFacts``, of the step that begins."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        handle = register_optimizer_step_pre_hook(self._steps)
        try:
            with (
                around_calls(torch.autograd, "backward", self._backward),
                around_calls(torch.optim.Optimizer, "__init__", self._made),
            ):
                yield
        finally:
            handle.remove()

    def _made(self, plain: Any, optimizer: Any, *given: Any, **named: Any) -> None:
        plain(optimizer, *given, **named)
        self._known.add(optimizer)

    @torch.no_grad()
    def _steps(self, optimizer: Any, *_: Any) -> None:
        self.stale = ()
        if len(self._went) >= MOST:
            return
        entries = self._entries.get(optimizer, [])
        for one in entries:
            one.looks()
        parts = sorted({part for one in entries for part in one.parts})
        self.stale = tuple(dict.fromkeys((*self._of_other_turns(optimizer, parts), *self._from_before(parts))))
        line = line_of_program(frames_above(__file__))
        self._turns.append(_Turn(weakref.ref(optimizer), len(self._went), frozenset(parts), line))

    def _of_other_turns(self, optimizer: Any, parts: list[int]) -> Iterator[tuple[str, str]]:
        """Those of losses that another optimizer has stepped, before the last loss, which is of this one alone."""
        last = parts[-1] if parts else 0
        mine = {id(one.param) for one in self._entries.get(optimizer, ())}
        others = [one for each in self._entries.values() for one in each if id(one.param) not in mine]
        if any(last in one.parts for one in others):
            return
        for part in parts[:-1]:
            for turn in self._turns:
                taken = part in turn.parts and turn.at <= last and turn.optimizer() is not optimizer
                later = {self._went[one].line for one in parts if one >= turn.at}
                if taken and self._went[part].line not in later:
                    yield self._went[part].line, turn.line

    def _from_before(self, parts: list[int]) -> Iterator[tuple[str, str]]:
        """Those from outside of every loop around the step, in some of which the last one lies."""
        now = lines_of_program(frames_above(__file__))
        if parts and loops_have(self._went[parts[-1]].stands, now):
            outside = (self._went[part] for part in parts if not loops_have(self._went[part].stands, now))
            yield from ((one.line, "") for one in outside)

    def _backward(self, plain: Any, *given: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1 or len(self._went) >= MOST:
            return plain(*given, **named)
        with torch.no_grad():
            for one in self._followed():
                one.looks()
        result = plain(*given, **named)
        frames = list(frames_above(__file__))
        self._went.append(_Went(line_of_program(frames), tuple(lines_of_program(frames))))
        for one in self._followed():
            if (now := memory_of(one.param)) != one.memory:
                one.memory = now
                one.parts.append(len(self._went) - 1)
        return result

    def _followed(self) -> Iterator[_Entry]:
        """What is followed, of all optimizers that there are."""
        self._known = self._known if self._went else weakref.WeakSet(alive(torch.optim.Optimizer))
        for one in self._known:
            if one not in self._entries:
                held = {id(param): param for group in one.param_groups for param in group["params"]}
                trained = [param for param in held.values() if param.requires_grad]
                self._entries[one] = [_Entry(param) for param in nsmallest(SAMPLED, trained, key=torch.numel)]
            yield from self._entries[one]
