"""What units hold for a while within a step, whichever way they are sharded."""

from __future__ import annotations

from typing import Protocol

from prepkit.predict import replicated
from prepkit.predict.inputs import Inputs
from prepkit.predict.prediction import Label, Moment, Term
from prepkit.predict.unit_contents import UnitOf


class Sized(Protocol):
    """The sizes of one kind of unit, in bytes."""

    @property
    def kept(self) -> int:
        """Shards as stored, padding included."""

    @property
    def grads(self) -> int:
        """Gradients of the shards."""

    @property
    def gathered(self) -> int:
        """All shards in the gathered dtype: what an all-gather gives, and what the unit then holds."""

    @property
    def reduced(self) -> int:
        """What is reduced, in the reduction's dtype."""

    @property
    def whole_grads(self) -> int:
        """Unsharded gradients as autograd makes them, in the gathered dtype."""

    @property
    def summed_grads(self) -> int:
        """Unsharded gradients that wait for the last micro-batch."""


Sizes = tuple[Sized, ...]
"""One for each of ``Inputs.contents``."""


def summed(job: Inputs, sizes: Sizes, name: str) -> int:
    """One size of all units together."""
    return sum(int(getattr(sizes[index], name)) * times for index, times in job.counted.items())


def passing(job: Inputs, sizes: Sizes) -> tuple[Term, ...]:
    """Gathered units, and the buffers of gathering and reducing them; only those of some bytes."""
    if not job.units:
        return ()
    roots = [sizes[unit.content].gathered for unit in job.units if not unit.path]
    inner = [unit for unit in job.units if unit.path]
    found = [_gathered(job, sum(roots), "the root, kept from forward to backward")]
    found += [_gathered(job, *pair) for pair in _inner(job, inner, sizes)]
    largest = max(sizes[unit.content].gathered for unit in job.units)
    if job.axis("shard") > 1:
        found.append(working(largest, "all-gather of the next unit"))
    if job.trains:
        found += _backward(job, sizes)
    return tuple(term for term in found if term.bytes)


def _gathered(job: Inputs, size: int, what: str) -> Term:
    label = Label.BOUNDED if job.narrower else Label.EXACT
    return Term(category="gathered units", bytes=size, what=what, label=label, moment=Moment.PASS)


def working(size: int, what: str, label: Label = Label.BOUNDED) -> Term:
    """Bytes that come and go."""
    return Term(category="working buffers", bytes=size, what=what, label=label, moment=Moment.PASS)


def _inner(job: Inputs, inner: list[UnitOf], sizes: Sizes) -> list[tuple[int, str]]:
    """What the units below the root hold gathered at one moment."""
    if not inner:
        return []
    if all(unit.reshard is False for unit in inner):
        return [(sum(sizes[unit.content].gathered for unit in inner), "all other units, kept until backward")]
    found = [(_chain(inner, sizes), "the largest unit, with the units around it")]
    shards = job.axis("shard")
    if some := {unit.reshard for unit in inner if not isinstance(unit.reshard, bool)}:
        share = min(some)
        kept = sum(sizes[unit.content].gathered // int(unit.reshard) for unit in inner if unit.reshard in some)
        found.append((kept, f"parts over {share} of {shards} ranks, kept until backward"))
    return found


def _chain(inner: list[UnitOf], sizes: Sizes) -> int:
    """The most that a unit and the units around it hold: a nested unit runs while they are gathered."""
    own = {unit.path: sizes[unit.content].gathered for unit in inner}
    if not any("." in path for path in own):
        return max(own.values())
    most = 0
    for path, size in own.items():
        held, up = size, path
        while up := up.rpartition(".")[0]:
            held += own.get(up, 0)
        most = max(most, held)
    return most


def _backward(job: Inputs, sizes: Sizes) -> list[Term]:
    """Gradients on their way from autograd to the shards."""
    roots = [sizes[unit.content] for unit in job.units if not unit.path]
    inner = [sizes[unit.content] for unit in job.units if unit.path]
    found: list[Term] = []
    if job.accumulation > 1:
        size = summed(job, sizes, "summed_grads")
        found.append(working(size, "whole gradients of the micro-batches before the last", Label.EXACT))
    found += [working(root.whole_grads, "the root's gradients, whole until backward ends") for root in roots]
    found.append(working(max((one.whole_grads for one in inner), default=0), "gradients of one unit, whole"))
    found.append(working(max(one.reduced for one in (*roots, *inner)), "reduce-scatter of one unit"))
    if replicated.at_rest(job) == "host":
        largest = max(one.kept + one.grads for one in (*roots, *inner))
        found.append(working(largest, "a unit's shards and gradients on their way from and to the host"))
    return found
