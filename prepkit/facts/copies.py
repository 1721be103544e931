"""What is wrong with averages of weights, as they are made and used while a program runs."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class AverageFacts:
    """What is wrong with averages of weights, as they are made and used while a program runs."""

    itself: tuple[str, ...] = ()
    """Lines that mix weights which are trained with themselves, and nothing else."""
