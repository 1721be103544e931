"""What a program computes on the way: shapes, casts and random numbers; and how its weights began."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from attrs import define
from torch import nn

from prepkit.facts.values import ValueFacts


@define(eq=False)
class Computing:
    """Listens inside ``on()``."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        yield

    def facts(self, model: nn.Module | None) -> ValueFacts:
        """What was heard so far."""
        return ValueFacts()
