"""What a loss is made of: its terms, and what each of them trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from attrs import define

from prepkit.facts.terms import TermFacts


@define(eq=False)
class Terms:
    """Listens inside ``on()``."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        yield

    def facts(self) -> TermFacts:
        """What was heard so far."""
        return TermFacts()
