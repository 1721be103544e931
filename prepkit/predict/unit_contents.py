"""What units hold: parameters of one kind together, with their number."""

from __future__ import annotations

from math import prod

from attrs import frozen


@frozen
class Held:
    """One kind of parameter of a unit."""

    shape: tuple[int, ...]
    """Global shape; of a layer that is cut, that of one part."""
    size: int
    """Bytes of one element as stored."""
    floating: bool
    trains: bool
    group: int | None
    """Index of the optimizer group that steps it; None: nobody does."""
    widens: int = 1
    """Times as many elements as it has that its gradient has before it is sharded: torch gives an embedding that is
    cut by its rows a gradient of all rows."""
    start: int | None = None
    """Its first element in the flat parameter of its unit; None: it is in none."""

    @property
    def numel(self) -> int:
        """Elements, before anything is sharded."""
        return prod(self.shape)


@frozen
class Content:
    """What a unit holds: equal parameters together, with their number."""

    held: tuple[tuple[Held, int], ...]
    full: bool = False
    """Whether it is gathered and reduced in float32, whatever the others are."""

    def numel(self) -> int:
        """Elements of all."""
        return sum(one.numel * times for one, times in self.held)

    def bytes(self, *, trained: bool = False) -> int:
        """Bytes of all as stored, or of the trained ones."""
        return sum(one.numel * one.size * times for one, times in self.held if one.trains or not trained)

    def trains(self) -> bool:
        """Whether anything in it is trained."""
        return any(one.trains for one, _ in self.held)


@frozen
class UnitOf:
    """One unit that owns parameters."""

    path: str
    content: int
    """Index into ``Inputs.contents``."""
    reshard: bool | int
    """What becomes of the gathered parameters after forward."""
    stays: bool = False
    """Whether it stays gathered from one micro-batch to the next, until gradients are averaged."""
