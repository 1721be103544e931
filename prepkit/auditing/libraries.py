"""What a program asks of its libraries, and what comes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from attrs import define

from prepkit.facts.libraries import LibraryFacts


@define(eq=False)
class Asked:
    """Listens inside ``on()``."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        yield

    def facts(self) -> LibraryFacts:
        """What was heard so far."""
        return LibraryFacts()
