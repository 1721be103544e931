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
    """Of a batch those with that id; of texts places with that id, between others."""
    batch: int
    said: str
    """By what it is known that these are no pads."""


@frozen(kw_only=True)
class Rewritten:
    """What a data set holds of which reading a sample makes something else, each time."""

    line: str
    """Where it is written; empty: not known."""
    holder: str
    """As ``Noisy.x``."""


@frozen(kw_only=True)
class WrappedAround:
    """Small integers that are past what their dtype holds, while samples are read."""

    line: str
    dtype: str
    past: int
    numbers: int


@frozen(kw_only=True)
class LostSetting:
    """What a data set was told through one part of it, and was told otherwise through another before it was read.

    Or what another part is read with that was made with something else.
    """

    line: str
    name: str
    """The attribute that was set."""
    kind: str
    """Class of the data set."""
    other: str
    """The line that has set it otherwise; empty: it was made otherwise, and another part is read with this."""


@frozen(kw_only=True)
class InputFacts:
    """What a program hands to its layers and losses."""

    padding: tuple[PaddingRead, ...] = ()
    ordered: tuple[tuple[str, str, str], ...] = ()
    """Lines that accumulate over the samples of a batch which nobody has sorted, the function, and what draws them."""
    uniform: tuple[str, ...] = ()
    """Lines that draw in [0, 1) what is multiplied by a standard deviation and added to a mean."""
    rewritten: tuple[Rewritten, ...] = ()
    wrapped: tuple[WrappedAround, ...] = ()
    mispaired: tuple[tuple[str, str, str], ...] = ()
    """Functions that make a batch, a field of samples that they have put into another order, and one that they left."""
    lost: tuple[LostSetting, ...] = ()
    noises: tuple[tuple[str, str], ...] = ()
    """Lines that draw noise which a model is to say, and is not given; and lines that draw what it is given."""
    times: tuple[tuple[str, str], ...] = ()
    """Lines that draw what a model is told of, and lines that draw by what noise and data were mixed."""
    alike: tuple[tuple[str, str, int], ...] = ()
    """Calls whose samples were all the same before a backward: the line, the class of the model, and how many."""
