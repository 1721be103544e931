"""What is wrong with averages of weights, as they are made and used while a program runs."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class StandsStill:
    """An average that is evaluated with the buffers of its norms as they were."""

    line: str
    """That calls it."""
    model: str
    """Its class."""
    norms: int


@frozen(kw_only=True)
class RoundedAway:
    """An average in a dtype of few digits, of which numbers stand still in each update."""

    line: str
    """That updates it."""
    dtype: str
    share: float
    """Of the numbers that were looked at."""


@frozen(kw_only=True)
class StaysIn:
    """A model into which an average of its weights was put, and which goes on training from there."""

    line: str
    """That calls it to rest."""
    model: str
    """Its class."""


@frozen(kw_only=True)
class AverageFacts:
    """What is wrong with averages of weights, as they are made and used while a program runs."""

    itself: tuple[str, ...] = ()
    """Lines that mix weights which are trained with themselves, and nothing else."""
    still: tuple[StandsStill, ...] = ()
    rounded: tuple[RoundedAway, ...] = ()
    stays: tuple[StaysIn, ...] = ()
    often: tuple[tuple[str, int], ...] = ()
    """Weights of which an average is moved several times in each step, and how often; no name: one of the model's."""
