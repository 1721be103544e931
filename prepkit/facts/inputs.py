"""What a program hands to its layers and losses: samples as they are read, ids, noise."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class PaddingRead:
    """A table whose row of zeros stands for what samples are really about."""

    line: str
    """Where it is looked up."""
    row: int
    """Its ``padding_idx``."""
    samples: int
    """Of a batch those with that id, of which a model says one and the same."""
    batch: int


@frozen(kw_only=True)
class InputFacts:
    """What a program hands to its layers and losses."""

    padding: tuple[PaddingRead, ...] = ()
    ordered: tuple[tuple[str, str, str], ...] = ()
    """Lines that accumulate over the samples of a batch which nobody has sorted, the function, and what draws them."""
    uniform: tuple[str, ...] = ()
    """Lines that draw in [0, 1) what is multiplied by a standard deviation and added to a mean."""
    other_noise: tuple[tuple[str, str], ...] = ()
    """Lines that draw the noise that a model is to tell, and lines that draw what is in its input."""
    rewritten: tuple[tuple[str, str], ...] = ()
    """Classes of data sets that write into their own samples as they are read, and the attribute."""
    wrapped: tuple[tuple[str, str, str], ...] = ()
    """Lines that compute beyond the range of whole numbers as a sample is read: the line, the method, the dtype."""
    swapped: tuple[tuple[str, str], ...] = ()
    """Classes of transformers models that were given a mask that is none: the class, and what it is instead."""
