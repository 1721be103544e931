"""Values that a program has changed on the way, and how its weights began."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Permuted:
    """A ``view`` or ``reshape`` that gives sizes another order, where a permutation was meant."""

    line: str
    function: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    order: tuple[int, ...] = ()
    """Dimensions as ``permute`` would take them; empty: not known."""


@frozen(kw_only=True)
class LostSums:
    """A sum with what stands at some places, written to each of them, of which some are named more than once."""

    line: str
    said: str
    """The statement."""
    repeats: int
    """Sums that others are written over."""
    instead: str = ""
    """What keeps all of them, as code; empty: not known."""


@frozen(kw_only=True)
class RepeatedDraws:
    """A line that seeds every so many steps, behind which a training draws what it has drawn before."""

    line: str
    seed: int
    every: int


@frozen(kw_only=True)
class ValueFacts:
    """Values that a program has changed on the way."""

    permuted: tuple[Permuted, ...] = ()
    emptied: tuple[tuple[str, str], ...] = ()
    """Lines that have made whole numbers of fractions, which are all 0 then, and the method."""
    reseeded: tuple[tuple[str, int], ...] = ()
    """Lines of a step that seed torch's generator, and the number that is the same in each step."""
    repeated: tuple[RepeatedDraws, ...] = ()
    not_called: tuple[tuple[str, str], ...] = ()
    """Lines that name a method and do not call it, and what they say."""
    none_given: tuple[tuple[str, str, str], ...] = ()
    """Lines that give on what a method of a list, set or table returns that changes it: the line, what takes it (empty:
    a name), and the call."""
    unused: tuple[tuple[str, str], ...] = ()
    """Lines that are one call, which changes nothing and whose result nobody takes, and the call."""
    ranked: tuple[tuple[str, str, str], ...] = ()
    """Lines that count with an order as if it were places: its name, and the line that sorts."""
    inverted: tuple[str, ...] = ()
    """Lines that invert whole numbers which are 0 or 1."""
    blended: tuple[str, ...] = ()
    """Lines that make whole numbers of means of whole numbers, as of classes that were interpolated."""
    lost_sums: tuple[LostSums, ...] = ()
    unkept: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Lines inside of which weights were written that FSDP1 had put together, and does not write back, with those."""
    written_away: tuple[tuple[str, str, str], ...] = ()
    """Lines that write to a copy that nobody holds: the line, what it writes to, and what makes the copy."""


@frozen(kw_only=True)
class Following:
    """A copy of a weight that goes most of its distance to it in each of several steps."""

    name: str
    """Of the weight; empty: not known."""
    part: float
    """Of the distance."""


@frozen(kw_only=True)
class BeginningFacts:
    """How the layers of a model that trains began."""

    alike: tuple[tuple[str, int], ...] = ()
    """Weights whose units all have one row, and one gradient: the name, and how many units there are."""
    keeps: tuple[tuple[str, float], ...] = ()
    """Batch norms whose momentum is what others call the part that is kept: the name and the momentum."""
    repeated: tuple[tuple[str, str, int, str], ...] = ()
    """Lists of layers that hold one layer several times: the name, class of the layer, how often, and the line that
    has multiplied it."""
