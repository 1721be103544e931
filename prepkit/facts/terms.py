"""What the terms of a loss are, and what they train."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Cancelled:
    """A term that trains nothing, as what is in it cancels."""

    line: str
    """Where it goes backward."""
    of: str
    """What cancels: ``difference`` or ``quotient``."""
    shape: tuple[int, ...]
    """Of it."""
    terms: int
    """How many the loss has."""


@frozen(kw_only=True)
class ConstantTerm:
    """A term without a graph that is made of what trains."""

    line: str
    """Where it is made."""
    name: str
    made: str
    """What of its own text has taken the graph away."""


@frozen(kw_only=True)
class OddDivergence:
    """A divergence in a loss that has a sign that no divergence has."""

    line: str
    """Where it goes backward."""
    name: str
    value: float
    subtracted: bool = False


@frozen(kw_only=True)
class Dropped:
    """A result with a graph that the loss does not contain and nobody reads."""

    line: str
    """Where it is made."""
    name: str
    shape: tuple[int, ...]
    weights: int = 0
    """How many weights it is, of the shapes of those that train; 0: it is none."""


@frozen(kw_only=True)
class HalfMixed:
    """Samples that are mixed with others of their batch, with labels that are not."""

    line: str
    """Where they are mixed."""
    name: str
    labels: str
    """The name of the labels in the loss."""
    left: str = ""
    """That of the labels of the others, which nobody reads; empty: there is none."""


@frozen(kw_only=True)
class FlatWay:
    """Weights to which a loss comes by way of a step alone, that has no slope."""

    line: str
    """Where it goes backward."""
    step: str
    """As ``round``."""
    weights: tuple[str, ...]


@frozen(kw_only=True)
class Overwritten:
    """What each of several modules gives for a loss that contains that of the last alone."""

    line: str
    """Where the last was called."""
    model: str
    """Class of what they are in."""
    kind: str
    """Their class."""
    method: str
    name: str
    """What the statement binds by which each is called."""
    before: tuple[str, ...]
    """Paths of those whose terms are lost, in order of their calls."""
    last: str
    shape: tuple[int, ...]


@frozen(kw_only=True)
class OddBackward:
    """A function with a backward of its own, which gives something else than the slope of its forward."""

    line: str
    """Where it was called."""
    name: str
    argument: str
    """For which it gives that."""
    ratio: float | None
    """What it gives, times the slope; None: no number makes one of the other."""


@frozen(kw_only=True)
class TermFacts:
    """What the terms of a loss are, and what they train."""

    targets: tuple[str, ...] = ()
    """Lines where a loss goes backward that trains the target too that it has made of a reward and its own outputs."""
    cancelled: tuple[Cancelled, ...] = ()
    constants: tuple[ConstantTerm, ...] = ()
    divergences: tuple[OddDivergence, ...] = ()
    masked: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Lines that go backward whose loss takes a minimum or maximum of what a mask has put there, and its shape."""
    undone: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Lines that go backward whose loss has a sum ``x + (y - x)``, and its shape."""
    dropped: tuple[Dropped, ...] = ()
    half_mixed: tuple[HalfMixed, ...] = ()
    flat: tuple[FlatWay, ...] = ()
    overwritten: tuple[Overwritten, ...] = ()
    backwards: tuple[OddBackward, ...] = ()
