"""How a program's loop stands to its schedules, wrappers and collectives, and whether its random numbers come again."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from heapq import nsmallest
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any

import torch
from attrs import define, field, frozen
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import Dataset

from prepkit.facts.loops import TurnFacts
from prepkit.facts.values import RepeatedDraws
from prepkit.objects.local_part import local
from prepkit.observe.prepared.around import Line, frames_above, is_foreign, is_of_library, line_of_program
from prepkit.observe.prepared.instead import around_calls
from prepkit.observe.prepared.modules import generator
from prepkit.observe.prepared.optimizers import inner
from prepkit.observe.prepared.schedules import by_pass, is_idle

MOST_STATES = 4096
"""Steps of one optimizer that are known."""
SAMPLED, ELEMENTS = 4, 16
"""Parameters that tell by so many numbers of each whether they are as they were."""
MOST_SEEDINGS = 64
"""Lines that have seeded."""


@define(eq=False)
class Turning:
    """Listens inside ``on()``."""

    _made_at: weakref.WeakKeyDictionary[Any, str] = field(factory=weakref.WeakKeyDictionary)
    """The line that has made each scheduler."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        with ExitStack() as stack:
            for kind in (LRScheduler, ReduceLROnPlateau):
                stack.enter_context(around_calls(kind, "__init__", self._made))
            yield

    def facts(self, scheduler: Any = None, optimizer: Any = None) -> TurnFacts:
        """What was heard so far, with what the text of the program says of this scheduler."""
        if optimizer is None or inner(getattr(scheduler, "optimizer", None)) is not inner(optimizer):
            return TurnFacts()
        frames = list(frames_above(__file__))
        idle = is_idle(scheduler, frames)
        return TurnFacts(
            idle=(type(scheduler).__name__, self._made_at.get(scheduler, "")) if idle else ("", ""),
            by_pass=by_pass(scheduler, frames),
        )

    def _made(self, plain: Any, scheduler: Any, *given: Any, **named: Any) -> None:
        self._made_at[scheduler] = line_of_program(frames_above(__file__))
        plain(scheduler, *given, **named)


# --- random numbers ---


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
    weights: dict[tuple[float, ...], int] = field(factory=dict)
    """What some of them were, by the state of the generators then."""
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
        weights = hash(_some_weights(optimizer))
        if mine.weights.get(state) == weights:  # from which it is trained anew, as by the next fold
            mine.pairs.clear()
        if len(mine.weights) < MOST_STATES:
            mine.weights.setdefault(state, weights)
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


def random_states() -> tuple[float, ...]:
    """Those of torch's generators."""
    return generator("cpu"), *(one.get_offset() for one in torch.cuda.default_generators)


def _gives_samples(frame: FrameType) -> bool:
    """Return whether it is of a data set, or of a generator: these seed to give what they gave before."""
    is_generator = bool(frame.f_code.co_flags & CO_GENERATOR) and not is_of_library(frame)
    return is_generator or isinstance(frame.f_locals.get("self"), Dataset)


def _some_weights(optimizer: Any) -> tuple[float, ...]:
    """Numbers of the smallest parameters that are stepped."""
    held = [param for group in optimizer.param_groups for param in group["params"]]
    moved = [one for one in held if one.grad is not None and not one.is_meta]
    some = (local(one).detach().flatten()[:ELEMENTS].tolist() for one in nsmallest(SAMPLED, moved, key=torch.numel))
    return tuple(number for each in some for number in each)
