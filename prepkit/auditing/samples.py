"""What is read while a script runs: data sets, what they compute, and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attrs import define

from prepkit.facts.samples import SampleFacts


@define(eq=False)
class Samples:
    """Listens inside ``on()``."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        yield

    def facts(self, alive: list[Any]) -> SampleFacts:
        """What was heard so far."""
        return SampleFacts()
