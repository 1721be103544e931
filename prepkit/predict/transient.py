"""Bytes that come and go within a step: gathered units, gradients before they are sharded, buffers of collectives.

The same for FSDP1 and FSDP2: what differs is the size of a unit, which each gives as ``UnitSizes``.
"""

from __future__ import annotations

from typing import Protocol

from prepkit.predict import replicated
from prepkit.predict.inputs import Inputs
from prepkit.predict.prediction import Label, Lifetime, Term
from prepkit.predict.unit_contents import UnitInstance, above


class UnitSizes(Protocol):
    """Bytes of one unit on one rank, at the stations of a step."""

    @property
    def kept(self) -> int:
        """Its shard at rest, in the stored dtype, padding included."""

    @property
    def grads(self) -> int:
        """Gradient of its shard, until the optimizer step."""

    @property
    def gathered(self) -> int:
        """All shards in the gathered dtype: what an all-gather gives, and what the unit then holds."""

    @property
    def reduced(self) -> int:
        """Input of the reduce-scatter, in the dtype of the reduction."""

    @property
    def unsharded_grads(self) -> int:
        """Unsharded gradients as autograd makes them, in the gathered dtype."""

    @property
    def summed_grads(self) -> int:
        """Unsharded gradients that add up until the last micro-batch."""


def summed(inputs: Inputs, sizes: tuple[UnitSizes, ...], name: str) -> int:
    """Bytes of all units together at one station; ``name`` is a property of ``UnitSizes``, ``sizes`` as contents."""
    return sum(int(getattr(sizes[index], name)) * count for index, count in inputs.counted.items())


def transient(inputs: Inputs, sizes: tuple[UnitSizes, ...]) -> tuple[Term, ...]:
    """Gathered units, and the buffers of gathering and reducing them; terms of 0 bytes are left out."""
    if not inputs.units:
        return ()
    roots = [sizes[unit.content].gathered for unit in inputs.units if not unit.path]
    inner = [unit for unit in inputs.units if unit.path]
    terms = [_gathered(inputs, sum(roots), "the root, kept from forward to backward")]
    terms += [_gathered(inputs, *pair) for pair in _inner(inputs, inner, sizes)]
    largest = max(sizes[unit.content].gathered for unit in inputs.units)
    if inputs.axis("shard") > 1:
        terms.append(working(largest, "all-gather of the next unit"))
    if inputs.trains:
        terms += _backward(inputs, sizes)
    return tuple(term for term in terms if term.bytes)


def _gathered(inputs: Inputs, size: int, what: str) -> Term:
    label = Label.BOUNDED if inputs.narrower else Label.EXACT
    return Term(category="gathered units", bytes=size, what=what, label=label, lifetime=Lifetime.PASS)


def working(size: int, what: str, label: Label = Label.BOUNDED) -> Term:
    """A buffer that is allocated and freed within forward and backward."""
    return Term(category="working buffers", bytes=size, what=what, label=label, lifetime=Lifetime.PASS)


def _inner(inputs: Inputs, inner: list[UnitInstance], sizes: tuple[UnitSizes, ...]) -> list[tuple[int, str]]:
    """Bytes and words of what the units below the root hold gathered at one moment."""
    if not inner:
        return []
    if all(unit.reshard is False for unit in inner):
        return [(sum(sizes[unit.content].gathered for unit in inner), "all other units, kept until backward")]
    gathered = [(_chain(inner, sizes), "the largest unit, with the units around it")]
    shards = inputs.axis("shard")
    if partly := {unit.reshard for unit in inner if not isinstance(unit.reshard, bool)}:
        share = min(partly)
        kept = sum(sizes[unit.content].gathered // int(unit.reshard) for unit in inner if unit.reshard in partly)
        gathered.append((kept, f"parts over {share} of {shards} ranks, kept until backward"))
    return gathered


def _chain(inner: list[UnitInstance], sizes: tuple[UnitSizes, ...]) -> int:
    """The most that a unit and the units around it hold: a nested unit runs while they are gathered."""
    own = {unit.path: sizes[unit.content].gathered for unit in inner}
    most = 0
    for path, size in own.items():
        most = max(most, size + sum(own.get(outer, 0) for outer in above(path)))
    return most


def _backward(inputs: Inputs, sizes: tuple[UnitSizes, ...]) -> list[Term]:
    """Gradients on their way from autograd to the gradient of the shard."""
    roots = [sizes[unit.content] for unit in inputs.units if not unit.path]
    inner = [sizes[unit.content] for unit in inputs.units if unit.path]
    terms: list[Term] = []
    if inputs.averagings < inputs.accumulation:
        size = summed(inputs, sizes, "summed_grads")
        terms.append(working(size, "whole gradients of the micro-batches before the last", Label.EXACT))
    terms += [working(root.unsharded_grads, "the root's gradients, whole until backward ends") for root in roots]
    terms.append(working(max((unit.unsharded_grads for unit in inner), default=0), "gradients of one unit, whole"))
    terms.append(working(max(unit.reduced for unit in (*roots, *inner)), "reduce-scatter of one unit"))
    if replicated.at_rest(inputs) == "host":
        largest = max(unit.kept + unit.grads for unit in (*roots, *inner))
        terms.append(working(largest, "a unit's shards and gradients on their way from and to the host"))
    return terms
