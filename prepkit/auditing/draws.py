"""Random numbers of a training that come again: a line seeds anew every so many steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any

import torch
from attrs import define, field, frozen
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import Dataset

from prepkit.facts.values import RepeatedDraws
from prepkit.observe.prepared.around import Line, is_foreign, is_of_library
from prepkit.observe.prepared.instead import around_calls
from prepkit.observe.prepared.modules import generator

MOST_STATES = 4096
"""Steps of one optimizer that are known."""
MOST_SEEDINGS = 64
"""Lines that have seeded."""


@frozen(eq=False)
class _Pair:
    """Two steps one behind the other, the second of which found other random numbers, and nobody has seeded between."""

    step: int
    seedings: int
    """Those of the program by then."""


@define(eq=False)
class _Drawn:
    """What the steps of one optimizer have found."""

    steps: int = 0
    state: tuple[float, ...] = ()
    """Of the generators, before the last one."""
    seedings: int = -1
    pairs: dict[tuple[tuple[float, ...], tuple[float, ...]], _Pair] = field(factory=dict)


@define(eq=False)
class Draws:
    """Listens inside ``on()``."""

    _courses: weakref.WeakKeyDictionary[Any, _Drawn] = field(factory=weakref.WeakKeyDictionary)
    _seedings: int = 0
    _stands: dict[tuple[Line, ...], int] = field(factory=dict)
    """Lines that have seeded, each called by the next, and the number."""
    _told: dict[str, RepeatedDraws] = field(factory=dict)
    """By line."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        handle = register_optimizer_step_pre_hook(self._steps)
        try:
            with (
                around_calls(nn.Module, "load_state_dict", self._loads),
                around_calls(torch.optim.Optimizer, "load_state_dict", self._loads),
            ):
                yield
        finally:
            handle.remove()

    def told(self) -> tuple[RepeatedDraws, ...]:
        """What was heard so far."""
        return tuple(self._told.values())

    def seeds(self, seed: int, stands: Iterable[Line], frames: Iterable[FrameType]) -> None:
        """Takes a call that has seeded torch."""
        self._seedings += 1
        if any(map(_gives_samples, frames)):
            stands = ()
        self._stands.pop(known := tuple(stands), None)  # the last one stands last
        self._stands[known] = seed
        if len(self._stands) > MOST_SEEDINGS:
            self._stands.pop(next(iter(self._stands)))

    def _steps(self, optimizer: Any, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        mine, state = self._courses.setdefault(optimizer, _Drawn()), random_states()
        goes_on = mine.seedings == self._seedings and mine.state != state
        mine.steps += 1
        if goes_on and len(mine.pairs) < MOST_STATES:
            before = mine.pairs.get((mine.state, state))
            if before is not None and before.seedings < self._seedings:
                self._repeats(mine.steps - before.step)
            mine.pairs[mine.state, state] = _Pair(mine.steps, self._seedings)
        mine.state, mine.seedings = state, self._seedings

    def _repeats(self, every: int) -> None:
        lines = [one for one, seed in self._stands.items() if seed == torch.initial_seed() and one]
        if lines:
            code, line = self._own_line(lines[-1])
            said = f"{code.co_filename.rpartition('/')[2]}:{line}"
            self._told.setdefault(said, RepeatedDraws(line=said, seed=torch.initial_seed(), every=every))

    def _own_line(self, stands: tuple[Line, ...]) -> Line:
        """The innermost one that no other seeding shares, as of a function that seeds whatever it can."""
        own = [one for one in stands if not is_foreign(one[0].co_filename)]
        shared = {line for other in self._stands if other != stands for line in other}
        return next((one for one in own if one not in shared), own[0] if own else stands[0])

    def _loads(self, plain: Any, owner: Any, *given: Any, **named: Any) -> Any:
        """What is trained from known weights anew may draw what it has drawn from there."""
        result = plain(owner, *given, **named)
        params = _held(owner) if isinstance(owner, torch.optim.Optimizer) else {*map(id, owner.parameters())}
        for optimizer in [*self._courses]:
            if not params.isdisjoint(_held(optimizer)):
                del self._courses[optimizer]
        return result


def random_states() -> tuple[float, ...]:
    """Those of torch's generators."""
    return generator("cpu"), *(one.get_offset() for one in torch.cuda.default_generators)


def _gives_samples(frame: FrameType) -> bool:
    """Return whether it is of a data set, or of a generator: these seed to give what they gave before."""
    is_generator = bool(frame.f_code.co_flags & CO_GENERATOR) and not is_of_library(frame)
    return is_generator or isinstance(frame.f_locals.get("self"), Dataset)


def _held(optimizer: Any) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}
