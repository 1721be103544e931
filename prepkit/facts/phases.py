"""What several phases of one program do to each other: stages, evaluations, trainings one after the other."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Outlived:
    """A scheduler that is ticked on, and whose optimizer steps no more."""

    scheduler: str
    """Its class."""
    line: str
    """That ticks it."""
    optimizer: str
    """Class of the optimizer that steps in the place of its own."""
    made: str
    """The line that has made that one; empty: not known."""


@frozen(kw_only=True)
class LeftBehind:
    """What of a model trains no more, or never has, though it is to."""

    model: str
    """Its class."""
    name: str
    """The first parameter or module."""
    count: int
    line: str
    """That steps."""


@frozen(kw_only=True)
class OtherMoments:
    """State that an optimizer was given to go on with, and that is not what stood here beside the same weights."""

    optimizer: str
    """Its class."""
    line: str
    """That has loaded it."""
    step: int
    """Behind which these weights stood, of all optimizers'."""
    weights: int
    """Of those that were looked at, of which it has another state."""
    key: str
    """What it has otherwise, of the first of them."""


@frozen(kw_only=True)
class OtherSamples:
    """A pass that goes on within one that was left, and not where that was left."""

    line: str
    """That has loaded what is gone on with."""
    step: int
    """Behind which it was left, of all optimizers'."""
    trained: int
    """Its batches until then."""
    passed: int
    """Batches that are passed over; 0: it begins with samples that were trained on."""
    others: bool
    """Whether these are others, and not too few or too many."""


@frozen(kw_only=True)
class WorstKept:
    """A choice between values of a measure that takes the other end of it than the measure's name says."""

    line: str
    who: str
    """What chooses, as the program writes it."""
    measure: str
    lower: bool
    """Whether lower values are better, by the measure's name."""
    never: str = ""
    """The value that it begins with, which none is better than; empty: it chooses the wrong end."""


@frozen(kw_only=True)
class EvaluationFacts:
    """What a program makes of its evaluations."""

    training: tuple[tuple[str, str, str], ...] = ()
    """Lines that evaluate a model in training mode, its class, and what of it gives other numbers there."""
    worst: tuple[WorstKept, ...] = ()
    refitted: tuple[tuple[str, str], ...] = ()
    """Lines that fit a transform once more, on what validates, and the transform."""


@frozen(kw_only=True)
class PhaseFacts:
    """What several phases of one program do to each other."""

    outlived: tuple[Outlived, ...] = ()
    stepped: tuple[str, ...] = ()
    """Where a training of its own begins, the parameters that optimizers have stepped in loops that have ended."""
    taken_over: bool = False
    """Whether an optimizer that holds parameters of the first one has stepped since that one did."""
    unheld: tuple[LeftBehind, ...] = ()
    """Weights that were frozen, get gradients now, and that no optimizer steps."""
    merged: tuple[LeftBehind, ...] = ()
    """Modules whose trained weights get gradients no more since a frozen one beside them was written."""
    idle: tuple[LeftBehind, ...] = ()
    """Adapters of peft that were added behind a step, and not switched on before the next."""
    loose: tuple[str, ...] = ()
    """Parameters that get gradients, stand in no module, and that no optimizer holds: names with their holders."""
    moments: tuple[OtherMoments, ...] = ()
    samples: tuple[OtherSamples, ...] = ()
    evaluations: EvaluationFacts = EvaluationFacts()
    parted: str = ""
    """The line that parts the samples anew in each pass, into what trains and what validates; empty: none does."""
