"""What stages of a pipeline send each other: whether each goes backward with the gradient of what it had sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from attrs import frozen
from torch import Tensor

from prepkit.facts.proof import HandedBack
from prepkit.proving.parts_of import numbers
from prepkit.proving.record_file import Record
from prepkit.proving.trace import sketch

SAME = 0.999
"""From this cosine on two gradients are one, which may have been scaled on its way."""
OTHER = 0.9
"""Up to this one they are others."""


@frozen(eq=False)
class PassedOn:
    """Sketches of an output that a rank has sent, or of an input that it has got, and of what came back to that."""

    call: int
    values: Tensor
    gradient: Tensor


Sides = tuple[list[PassedOn], list[PassedOn]]
"""What a rank may have sent, and got."""


def sides(record: Record) -> Sides:
    """Those of one rank."""
    sent, got = list[PassedOn](), list[PassedOn]()
    for number in range(len(record.head.calls)):
        for key, one in record.tensors.items():
            kind, _, place = key.partition(f"/{number}/")
            if kind == "output" and (seen := record.tensors.get(f"seen/{number}/{place}")) is not None:
                sent.append(PassedOn(number, seen, sketch(numbers(one))))
            if kind == "back":
                got.append(PassedOn(number, sketch(numbers(record.tensors[f"input/{number}/{place}"])), one))
    return sent, got


def handed_back(every: Sequence[Sides]) -> Iterator[HandedBack]:
    """Yield where a rank has gone backward with another gradient than that of what it had sent. Pure."""
    for rank, (sent, _) in enumerate(every):
        for one in sent:
            takers = [(to, got) for to, (_, side) in enumerate(every) for got in side if to != rank and _same(one, got)]
            if len(takers) != 1:  # two calls gave the same, or nobody got it as it is
                continue
            ((to, got),) = takers
            if _cosine(one.gradient, got.gradient) < OTHER:
                of = [other.call for other in every[to][1] if _cosine(one.gradient, other.gradient) > SAME]
                yield HandedBack(rank=rank, call=one.call, to=to, got=got.call, of=of[0] if of else None)


def _same(one: PassedOn, other: PassedOn) -> bool:
    return one.values.shape == other.values.shape and torch.equal(one.values, other.values)


def _cosine(one: Tensor, other: Tensor) -> float:
    """Of the elements, which stand behind the norm."""
    if one.shape != other.shape:
        return 0.0
    length = float(one[1:].norm() * other[1:].norm())
    return float(one[1:] @ other[1:]) / length if length else 1.0
