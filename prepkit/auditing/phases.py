"""Phases of one program: optimizers that others replace, and what they leave behind."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from attrs import define, field, frozen
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from prepkit.facts.phases import Outlived, PhaseFacts
from prepkit.observe.prepared.around import Line, frames_above, line_of_program, lines_of_program, loops_have
from prepkit.observe.prepared.instead import around_calls
from prepkit.observe.prepared.optimizers import as_rate, inner

TICKED = (LRScheduler, SequentialLR, ChainedScheduler, ReduceLROnPlateau)
"""Classes with a ``step`` of their own."""
IN_VAIN = 2
"""Ticks in a row of a scheduler whose optimizer has rested while another stepped: fewer say nothing."""


@define(eq=False)
class _Course:
    """What is known of one optimizer that has stepped."""

    held: frozenset[int] = frozenset()
    """The ``id``s of its parameters."""
    last: int = 0
    """The number of its last step among those of all."""
    made: str = ""
    """The line that has made it."""
    stands: tuple[Line, ...] = ()
    """Where its first step stands."""


@frozen(eq=False)
class _Tick:
    """Where all stood when a scheduler was ticked."""

    own: int
    """The last step of its optimizer."""
    steps: int
    """Those of all."""
    rates: tuple[float | None, ...]
    """Of the optimizer that has stepped last."""
    in_vain: int


@define(eq=False)
class Phases:
    """Listens inside ``on()``."""

    _steps: int = 0
    """Of all optimizers."""
    _courses: weakref.WeakKeyDictionary[Any, _Course] = field(factory=weakref.WeakKeyDictionary)
    _made_at: weakref.WeakKeyDictionary[Any, str] = field(factory=weakref.WeakKeyDictionary)
    _first: weakref.ref[Any] | None = None
    """The optimizer that has stepped first."""
    _ticking: bool = False
    _ticks: weakref.WeakKeyDictionary[Any, _Tick] = field(factory=weakref.WeakKeyDictionary)
    _driven: weakref.WeakSet[Any] = field(factory=weakref.WeakSet)
    """Optimizers that a scheduler was made for."""
    _outlived: dict[Outlived, None] = field(factory=dict)
    begins_anew: bool = False
    """Whether the step that begins is the first of a training of its own, behind those of all other optimizers."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        handle = register_optimizer_step_pre_hook(self._begins)
        try:
            with ExitStack() as stack:
                for kind in TICKED:
                    stack.enter_context(around_calls(kind, "step", self._ticked))
                stack.enter_context(around_calls(torch.optim.Optimizer, "__init__", self._made))
                yield
        finally:
            handle.remove()

    def told(self) -> dict[str, Any]:
        """What was heard so far, as a field of ``WindowFacts``."""
        return {"phases": PhaseFacts(outlived=tuple(self._outlived), taken_over=self._taken_over())}

    def _made(self, plain: Any, optimizer: Any, *given: Any, **named: Any) -> None:
        plain(optimizer, *given, **named)
        self._made_at[optimizer] = line_of_program(frames_above(__file__))

    def _begins(self, optimizer: Any, *_: Any) -> None:
        """A step of any optimizer begins."""
        self._steps += 1
        self._first = self._first or weakref.ref(optimizer)
        held = frozenset(id(param) for group in optimizer.param_groups for param in group["params"])
        self.begins_anew = optimizer not in self._courses and self._is_apart(held)
        course = self._courses.setdefault(optimizer, _Course(made=self._made_at.get(optimizer, "")))
        course.stands = course.stands or tuple(lines_of_program(frames_above(__file__)))
        course.last, course.held = self._steps, held

    def _is_apart(self, held: frozenset[int]) -> bool:
        """Whether what begins to step now holds what no other has stepped, in no loop in which another has."""
        now = lines_of_program(frames_above(__file__))
        others = self._courses.values()
        return bool(self._courses) and not any(held <= one.held or _in_one_run(one.stands, now) for one in others)

    def _taken_over(self) -> bool:
        first = None if self._first is None else self._first()
        mine = None if first is None else self._courses.get(first)
        return mine is not None and any(one.last > mine.last and one.held & mine.held for one in self._courses.values())

    def _ticked(self, plain: Any, scheduler: Any, *given: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or self._ticking:  # inside another, as SequentialLR ticks its parts
            return plain(scheduler, *given, **named)
        self._ticking = True
        try:
            result = plain(scheduler, *given, **named)
        finally:
            self._ticking = False
        self._looks(scheduler, inner(scheduler.optimizer))
        return result

    def _looks(self, scheduler: Any, optimizer: Any) -> None:
        """Notes where all stand, and tells of the last one of several ticks in a row that nobody has used."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            return
        self._driven.add(optimizer)
        mine, before = self._courses.get(optimizer, _Course()), self._ticks.get(scheduler)
        beside = [one for one, course in self._courses.items() if self._replaces(course, mine)]
        beside = [one for one in beside if type(one) is type(optimizer)]  # an LBFGS behind an Adam has other rates
        rates = tuple(as_rate(group.get("lr")) for one in beside for group in one.param_groups)
        alike = before is not None and before.own == mine.last and before.steps < self._steps
        used = not beside or not alike or any(one in self._driven for one in beside)
        used = used or (before is not None and before.in_vain > 0 and before.rates != rates)
        in_vain = 0 if used or before is None else before.in_vain + 1
        self._ticks[scheduler] = _Tick(mine.last, self._steps, rates, in_vain)
        if in_vain == IN_VAIN + 1:  # the first of them has seen no rate before
            line, names = line_of_program(frames_above(__file__)), [type(one).__name__ for one in (scheduler, *beside)]
            made = self._courses[beside[0]].made
            self._outlived[Outlived(scheduler=names[0], line=line, optimizer=names[1], made=made)] = None

    def _replaces(self, other: _Course, mine: _Course) -> bool:
        """Whether another optimizer has stepped parameters of this one since this one has, and has stepped last."""
        shared = len(other.held & mine.held)
        return bool(mine.last) and other.last == self._steps > mine.last and 2 * shared > len(other.held)


def _in_one_run(before: Sequence[Line], now: Sequence[Line]) -> bool:
    """Whether both stand in one run of some loop: of a function that is called twice, its loop runs twice."""
    for first, second in zip(reversed(before), reversed(now), strict=False):
        if first[0] is second[0] and loops_have([first], [second]):
            return True
        if first != second:
            return False
    return False
