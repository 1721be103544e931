"""Outputs of the root as the loop got them, beside those that the bare model gives again."""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

import torch
from attrs import define, field, frozen
from torch import Tensor

from prepkit.facts.proof import near
from prepkit.proving.loss_graph import dtype_inside
from prepkit.proving.parts_of import numbers
from prepkit.proving.record_file import Record, RecordedCall, Returned
from prepkit.proving.trace import ELEMENTS, sketch
from prepkit.rules.run.proof_causes import MARGIN

RETURNED = 64
"""Outputs of a call that are kept."""
FURTHEST = 0.25
"""Of an output's size: beyond it nothing is rounding, even where two replays are as far apart."""
REORDERED = "has the values that the model returns in another order"
AGAIN = "what the same inputs, weights, buffers and torch's generator give again"


def is_compared(tensor: Tensor) -> bool:
    """Return whether its numbers are kept and compared."""
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.layout is torch.strided


def returned(place: int, tensor: Tensor) -> Returned:
    """What a record says of an output, beside its sketch."""
    kinds = {"dtype": _word(tensor.dtype), "inside": _word(dtype_inside(tensor))}
    return Returned(place=place, shape=tuple(tensor.shape), **kinds)


def _word(dtype: torch.dtype) -> str:
    return str(dtype.to_real()).removeprefix("torch.")


@frozen(eq=False)
class Replayed:
    """An output of a replay."""

    values: Tensor
    """Its sketch."""
    shape: tuple[int, ...]
    dtype: str


@define(eq=False)
class Outputs:
    """Those of one replay, by rank, call and place."""

    dtype: str
    """In which it was given weights and inputs."""
    seen: dict[tuple[int, int, int], Replayed] = field(factory=dict)

    def take(self, rank: int, number: int, outputs: list[Tensor]) -> None:
        """The outputs of one call."""
        for place, one in enumerate(outputs[:RETURNED]):
            if is_compared(one):
                self.seen[rank, number, place] = Replayed(sketch(numbers(one)), tuple(one.shape), _word(one.dtype))


@frozen(kw_only=True)
class OutputsTold:
    """What is to be told of all outputs."""

    changed: tuple[str, ...] = ()
    """Outputs to which something behind the model has done what can be named, a sentence each."""
    unrepeated: str = ""
    """The first whose gradient says nothing, because the replay does not give it again; empty: none."""
    unrepeated_on: tuple[int, ...] = ()
    """The ranks of which outputs are such, where those of rank 0, whose model is copied, are not."""
    aside: str = ""
    """The first to which no gradient has come back, and that is other than in the replay; empty: none."""


def compared(records: tuple[Record, ...], replays: tuple[Outputs, Outputs], eps: float) -> OutputsTold:
    """Recorded outputs beside those of the exact and of the rounded replay. ``eps``: the rounding unit."""
    changed: dict[str, None] = {}
    off: dict[int, list[_Pair]] = {}
    for one in _each(records, replays, eps):
        changed |= dict.fromkeys(one.casts())
        if one.off > one.allowed:
            off.setdefault(one.mine.place, []).append(one)
    told: dict[bool, str] = {}
    for pairs in off.values():
        first, hows = pairs[0], {one.how() for one in pairs}
        how = hows.pop() if len(hows) == 1 else ""
        if how and (len(pairs) > 1 or how == REORDERED):  # a model that counts its calls scales each by itself
            changed |= dict.fromkeys(f"{one.name} {how}" for one in pairs)
        if first.counts or not how:
            told.setdefault(first.counts, f"{first.name} is {first.off / (first.size or 1):.2g} x its size off {AGAIN}")
    ranks = sorted({one.record.head.rank for pairs in off.values() for one in pairs if one.counts})
    on = () if 0 in ranks else tuple(ranks)
    said = {"unrepeated": told.get(True, ""), "aside": told.get(False, "")}
    return OutputsTold(changed=tuple(changed), unrepeated_on=on, **said)


def astray(records: tuple[Record, ...], replays: list[Outputs], eps: float) -> str:
    """The first output that the exact replay gives quite otherwise than the run, and the rounded one as the run did.

    Then it is float64 in which the model computes something else, by a fault of torch's or of its own. Empty: none.
    """
    for one in _each(records, (replays[0], replays[1]), eps):
        if one.rounded.values.shape == one.values.shape and one.off > FURTHEST * one.size:
            near_run = float((one.rounded.values - one.values).norm()) <= MARGIN * eps * float(one.values.norm())
            if near_run:
                return f"{one.name} is {one.off / (one.size or 1):.2g} x its size off what it was"
    return ""


def _each(records: tuple[Record, ...], replays: tuple[Outputs, Outputs], eps: float) -> Iterator[_Pair]:
    exact, rounded = replays
    for record in records:
        for number, call in enumerate(record.head.calls):
            for mine in call.returned:
                key, kept = (record.head.rank, number, mine.place), record.tensors.get(f"seen/{number}/{mine.place}")
                if kept is None or key not in exact.seen or key not in rounded.seen:
                    continue
                pair = _Pair(record, call, number, mine, kept, exact.seen[key], rounded.seen[key], exact.dtype, eps)
                if kept.shape == pair.exact.values.shape:
                    yield pair


@frozen(eq=False)
class _Pair:
    record: Record
    call: RecordedCall
    number: int
    mine: Returned
    values: Tensor
    exact: Replayed
    rounded: Replayed
    given: str
    """The dtype in which the exact replay was given everything."""
    eps: float

    @property
    def name(self) -> str:
        return f"output {self.mine.place} of call {self.number} on rank {self.record.head.rank}"

    @property
    def counts(self) -> bool:
        """Whether a gradient has come back to it."""
        return self.mine.place in self.call.outputs

    @property
    def size(self) -> float:
        return float(self.exact.values.norm())

    @property
    def rounding(self) -> float:
        """What rounding does to a sketch of it."""
        return MARGIN * (float((self.rounded.values - self.exact.values).norm()) + self.eps * self.size)

    @property
    def allowed(self) -> float:
        return min(self.rounding, FURTHEST * self.size)

    @property
    def off(self) -> float:
        return float((self.values - self.exact.values).norm())

    def how(self) -> str:
        """What was done to it, where that can be named; empty: it cannot."""
        seen, again = self.values, self.exact.values
        ratio = float(seen @ again) / (self.size**2 or 1.0)
        if not near(ratio, 1.0) and float((seen - ratio * again).norm()) <= min(abs(ratio), 1.0) * self.allowed:
            return f"is {ratio:.3f} x what the model returns" if ratio else "is zeros, and the model returns others"
        small = seen.numel() <= ELEMENTS
        one, other = (row[1:].sort().values if small else row[:1] for row in (seen, again))
        length = float(other.norm()) or 1.0
        exactly = small or self.eps < 1e-5  # norms of many elements are much alike, whatever was drawn
        if exactly and float((one - other).norm()) <= self.allowed * (length / (sqrt(2) * self.size or 1.0)):
            return REORDERED
        return ""

    @property
    def inputs(self) -> set[str]:
        """Dtypes of what the call was given, to which a model may cast its outputs."""
        begin = f"input/{self.number}/"
        return {_word(self.record.tensors[key].dtype) for key in self.record.tensors if key.startswith(begin)}

    def casts(self) -> Iterator[str]:
        """Yield how it was cast behind the model to a coarser dtype."""
        own, mine = self.exact.dtype, self.mine.dtype
        if self.given != "float64":
            return
        if own not in ("float64", mine) and own == self.rounded.dtype and _eps(mine) > _eps(own):
            yield f"{self.name} is in {mine}, and the model itself makes it {own}"
        elif own == "float64" and _eps(mine) > _eps(self.mine.inside) and mine not in self.inputs:
            yield f"{self.name} was cast to {mine} behind the model, which computes in {self.mine.inside}"


def _eps(dtype: str) -> float:
    return torch.finfo(getattr(torch, dtype)).eps


def from_outside(ends: list[Tensor], arrived: list[Tensor]) -> list[Tensor]:
    """What arrived at outputs less what came from other outputs: logits get a gradient of the loss beside them too.

    To a leaf, as a weight that the model returns, no more was recorded than came from outside.
    """
    if len(ends) == 1:
        return arrived
    behind = [
        [at for at, other in enumerate(ends) if other is not end and not other.is_leaf and _reaches(end, other)]
        for end in ends
    ]  # outputs from which each was computed
    outside: dict[int, Tensor] = {}
    for at in sorted(range(len(ends)), key=lambda at: -len(behind[at])):
        later = [number for number in outside if at in behind[number]]
        grad = arrived[at]
        if later:
            seeds = [outside[number] for number in later]
            (through,) = torch.autograd.grad([ends[number] for number in later], ends[at], seeds, retain_graph=True)
            grad = grad - through
        outside[at] = grad
    return [outside[at] for at in range(len(ends))]


def _reaches(end: Tensor, other: Tensor) -> bool:
    """Return whether an output was computed from another."""
    if end.is_leaf:
        return False
    (found,) = torch.autograd.grad(end, other, torch.ones_like(end), retain_graph=True, allow_unused=True)
    return found is not None
