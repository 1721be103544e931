"""Shards on dim 0 per parameter, gathered unit by unit (torch ``fully_shard``).

``q = ceil(d0 / S)`` rows are allocated on each of S ranks, also where fewer or none are used: torch pads the shard so
that it gathers without a copy (``FSDPParam._init_sharded_param``). What the optimizer makes is not padded.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from math import prod

from attrs import define

from prepkit.predict import notes, replicated
from prepkit.predict.inputs import Inputs
from prepkit.predict.optimizers import State, rule_of
from prepkit.predict.prediction import Label, Moment, Prediction, RankClass, Term
from prepkit.predict.traffic import traffic
from prepkit.predict.transient import passing, summed, working
from prepkit.predict.unit_contents import Content, Held


def rows(size: int, shards: int, index: int) -> tuple[int, int]:
    """Rows of a dim of this size that the rank uses, and rows that it allocates.

    >>> [rows(5, 4, index) for index in range(4)]
    [(2, 2), (2, 2), (1, 2), (0, 2)]
    """
    padded = -(-size // shards)
    return max(0, min(size - index * padded, padded)), padded


def alike(sizes: Iterable[int], shards: int) -> tuple[tuple[int, int], ...]:
    """Runs of indices that hold the same rows of every size, as first and last: at most two cuts per distinct size.

    >>> alike((5, 8), 4), alike((3,), 16384)
    (((0, 1), (2, 2), (3, 3)), ((0, 2), (3, 16383)))
    """
    cuts = {0}
    for size in set(sizes):
        if padded := -(-size // shards):
            cuts |= {size // padded, size // padded + 1}
    starts = sorted(cut for cut in cuts if cut < shards)
    ends = [start - 1 for start in starts[1:]] + [shards - 1]
    return tuple(zip(starts, ends, strict=True))


@define(frozen=True, slots=False)
class Sizes:
    """The sizes of one kind of unit over so many shards, in bytes."""

    content: Content
    job: Inputs
    shards: int

    def _gathered(self, one: Held) -> int:
        return self.job.gathered_size if self.job.gathered_size and one.floating else one.size

    def _padded(self, one: Held) -> int:
        """Elements that every rank allocates; a scalar, which only engines without shards leave alone, is one."""
        if not one.shape:
            return 1
        return -(-one.shape[0] // self.shards) * prod(one.shape[1:])

    @cached_property
    def kept(self) -> int:
        """Shards as stored, padding included."""
        return sum(self._padded(one) * one.size * times for one, times in self.content.held)

    @cached_property
    def grads(self) -> int:
        """One reduce-scatter output in the stored dtype, shared by the unit's parameters."""
        return sum(self._padded(one) * one.size * times for one, times in self.content.held if one.trains)

    @cached_property
    def gathered(self) -> int:
        """All shards in the gathered dtype: what an all-gather gives, and what the unit then holds."""
        return self.shards * sum(self._padded(one) * self._gathered(one) * n for one, n in self.content.held)

    @cached_property
    def reduced(self) -> int:
        """Input of the reduce-scatter, in the reduction's dtype."""
        held = [(one, times) for one, times in self.content.held if one.trains]
        return self.shards * sum(self._padded(o) * (self.job.reduced_size or self._gathered(o)) * n for o, n in held)

    @cached_property
    def whole_grads(self) -> int:
        """Unsharded gradients as autograd makes them, in the gathered dtype."""
        return sum(o.numel * o.widens * self._gathered(o) * n for o, n in self.content.held if o.trains)

    @cached_property
    def summed_grads(self) -> int:
        """Unsharded gradients that wait for the last micro-batch, in the reduction's dtype."""
        held = [(one, times) for one, times in self.content.held if one.trains]
        return sum(o.numel * o.widens * (self.job.reduced_size or self._gathered(o)) * n for o, n in held)


def predict_fsdp2(job: Inputs) -> Prediction:
    """Bytes of the ``FSDP2`` engine, with copies of the model (HSDP) and offload to the host."""
    shards = job.axis("shard")
    sizes = tuple(Sizes(content, job, shards) for content in job.contents)
    shared = (*_kept(job, sizes), *replicated.module_buffers(job), *passing(job, sizes), *_copies(job, sizes))
    classes = tuple(
        RankClass(
            first=first,
            last=last,
            ranks=(last - first + 1) * (job.world_size // shards),
            terms=(*shared, *replicated.optimizer_state(job, _state(job, shards, first))),
            empty=not any(_elements(content, shards, first) for content in job.contents),
        )
        for first, last in alike((one.shape[0] for c in job.contents for one, _ in c.held), shards)
    )
    made = Prediction(
        engine=job.engine,
        world_size=job.world_size,
        shards=shards,
        parts=job.axis("tensor"),
        classes=classes,
        traffic=traffic(job, sizes),
        not_predicted=replicated.not_predicted(job),
    )
    return notes.of_shards(job, made)


def _elements(content: Content, shards: int, index: int) -> int:
    return sum(rows(one.shape[0], shards, index)[0] * prod(one.shape[1:]) * n for one, n in content.held)


def _state(job: Inputs, shards: int, index: int) -> State | None:
    rule = rule_of(job.optimizer) if job.optimizer and job.trains else None
    if rule is None or job.optimizer is None:
        return None
    options = [dict(group) for group in job.optimizer.groups]
    state = State(0)
    for content, times in job.counted.items():
        for one, count in job.contents[content].held:
            if one.group is not None:
                local = (rows(one.shape[0], shards, index)[0], *one.shape[1:])
                state += rule(local, one.shape, one.size, options[one.group]) * (count * times)
    return state


def _kept(job: Inputs, sizes: tuple[Sizes, ...]) -> tuple[Term, ...]:
    place = replicated.at_rest(job)
    kept: tuple[Term, ...] = (
        Term(category="parameters", bytes=summed(job, sizes, "kept"), what="padded shards", place=place),
    )
    if job.ignored:
        kept += (Term(category="parameters", bytes=job.ignored, what="packed weights, whole on every rank"),)
    if not job.trains:
        return kept
    # Offloaded gradients are copied one by one and lose their padding, which only a device can show.
    grads = Term(
        category="gradients",
        bytes=summed(job, sizes, "grads"),
        what="padded shards",
        label=Label.BOUNDED if place == "host" else Label.EXACT,
        place=place,
        moment=Moment.STEP,
    )
    return (*kept, grads)


def _copies(job: Inputs, sizes: tuple[Sizes, ...]) -> tuple[Term, ...]:
    """Torch keeps what it averages over the copies where it casts the gradients (``foreach_reduce``)."""
    casts = job.reduced_size is not None and any(
        one.size != job.reduced_size for c in job.contents for one, _ in c.held
    )
    if job.axis("replicate") == 1 or not casts or not job.trains:
        return ()
    size = summed(job, sizes, "reduced") // job.axis("shard")
    found = working(size, "all-reduce of every unit, kept until backward ends")
    return (found,) if size else ()
