"""How a program's loop stands to its schedules, wrappers and collectives."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from attrs import define, field
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from prepkit.facts.loops import TurnFacts
from prepkit.observe.prepared.around import frames_above, line_of_program
from prepkit.observe.prepared.instead import around_calls
from prepkit.observe.prepared.schedules import by_pass, is_idle


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
        if optimizer is None or getattr(scheduler, "optimizer", None) is not optimizer:
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
