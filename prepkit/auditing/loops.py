"""How a program's loop stands to its schedules, wrappers and collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from attrs import define

from prepkit.facts.loops import TurnFacts


@define(eq=False)
class Turning:
    """Listens inside ``on()``."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        yield

    def facts(self) -> TurnFacts:
        """What was heard so far."""
        return TurnFacts()
