"""Shards on dim 0 per parameter, gathered unit by unit (torch ``fully_shard``).

A parameter whose dim 0 has ``d0`` rows takes ``ceil(d0 / S)`` rows on each of S ranks, also where fewer or none are
used: torch pads the shard so that it gathers without a copy (``FSDPParam._init_sharded_param``). Optimizer state is not
padded.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from math import prod

from attrs import define

from prepkit.plan.layout import chunk, chunk_rows
from prepkit.predict import notes, replicated
from prepkit.predict.inputs import Inputs
from prepkit.predict.optimizers import StateBytes, state_formula
from prepkit.predict.prediction import Label, Lifetime, Prediction, RankClass, Term, Traffic
from prepkit.predict.traffic import traffic
from prepkit.predict.transient import summed, transient, working
from prepkit.predict.unit_contents import ParamKind, UnitContent

FLOAT32 = 4
"""Bytes of an element of a unit in full precision, and of a whole parameter's gradient while it is averaged."""


def alike(sizes: Iterable[int], shards: int) -> tuple[tuple[int, int], ...]:
    """Runs of shard indices, first and last, whose chunks have the same rows of a dim of each of these sizes.

    At most two runs end within each distinct size: full chunks, then one that has fewer rows, then empty ones.

    >>> alike((5, 8), 4), alike((3,), 16384)
    (((0, 1), (2, 2), (3, 3)), ((0, 2), (3, 16383)))
    """
    starts = {0}
    for size in set(sizes):
        if rows := chunk_rows(size, shards):
            starts |= {size // rows, chunk_rows(size, rows)}  # of a chunk with fewer rows, and of empty ones
    firsts = sorted(start for start in starts if start < shards)
    lasts = [start - 1 for start in firsts[1:]] + [shards - 1]
    return tuple(zip(firsts, lasts, strict=True))


@define(frozen=True, slots=False)
class ShardSizes:
    """``UnitSizes`` of one FSDP2 unit over so many shards."""

    content: UnitContent
    inputs: Inputs
    shards: int

    def _gathered(self, param: ParamKind) -> int:
        """Bytes of an element while it is gathered."""
        if self.content.full and param.floating:
            return FLOAT32
        return self.inputs.gathered_size if self.inputs.gathered_size and param.floating else param.size

    def _reduced(self, param: ParamKind) -> int:
        """Bytes of an element of the gradient while it is reduced."""
        return FLOAT32 if self.content.full else self.inputs.reduced_size or self._gathered(param)

    def _padded(self, param: ParamKind) -> int:
        """Elements that every rank allocates; a scalar, which only engines without shards leave alone, is one."""
        if not param.shape:
            return 1
        return chunk_rows(param.shape[0], self.shards) * prod(param.shape[1:])

    @cached_property
    def _trained(self) -> tuple[tuple[ParamKind, int], ...]:
        return tuple((param, count) for param, count in self.content.params if param.trains)

    @cached_property
    def kept(self) -> int:
        """Shards as stored, padding included."""
        return sum(self._padded(param) * param.size * count for param, count in self.content.params)

    @cached_property
    def grads(self) -> int:
        """One reduce-scatter output in the stored dtype, shared by the unit's parameters."""
        return sum(self._padded(param) * param.size * count for param, count in self._trained)

    @cached_property
    def gathered(self) -> int:
        """All shards in the gathered dtype: what an all-gather gives, and what the unit then holds."""
        elements = ((self._padded(param) * count, param) for param, count in self.content.params)
        return self.shards * sum(numel * self._gathered(param) for numel, param in elements)

    @cached_property
    def reduced(self) -> int:
        """Input of the reduce-scatter, in the reduction's dtype."""
        return self.shards * sum(self._padded(param) * self._reduced(param) * count for param, count in self._trained)

    @cached_property
    def unsharded_grads(self) -> int:
        """Unsharded gradients as autograd makes them, in the gathered dtype."""
        elements = ((param.numel * param.grad_factor * count, param) for param, count in self._trained)
        return sum(numel * self._gathered(param) for numel, param in elements)

    @cached_property
    def summed_grads(self) -> int:
        """Unsharded gradients that wait for the last micro-batch, in the reduction's dtype."""
        elements = ((param.numel * param.grad_factor * count, param) for param, count in self._trained)
        return sum(numel * self._reduced(param) for numel, param in elements)


def predict_fsdp2(inputs: Inputs) -> Prediction:
    """Bytes of the ``FSDP2`` engine, with replicas (HSDP), tensor parallelism and offload to the host."""
    shards = inputs.axis("shard")
    sizes = tuple(ShardSizes(content, inputs, shards) for content in inputs.contents)
    shared = (
        *_kept(inputs, sizes),
        *replicated.module_buffers(inputs),
        *transient(inputs, sizes),
        *_replica_sums(inputs, sizes),
        *_averaging(inputs),
    )
    classes = tuple(
        RankClass(
            first=first,
            last=last,
            ranks=(last - first + 1) * (inputs.world_size // shards),
            terms=(*shared, *replicated.optimizer_state(inputs, _state(inputs, shards, first))),
            empty=not inputs.whole and not any(_elements(content, shards, first) for content in inputs.contents),
        )
        for first, last in alike((param.shape[0] for c in inputs.contents for param, _ in c.params), shards)
    )
    prediction = Prediction(
        engine=inputs.engine,
        world_size=inputs.world_size,
        shards=shards,
        tensor=inputs.axis("tensor"),
        classes=classes,
        traffic=(*traffic(inputs, sizes), *_averages(inputs)),
        not_predicted=replicated.not_predicted(inputs),
    )
    return notes.of_shards(inputs, prediction)


def _elements(content: UnitContent, shards: int, index: int) -> int:
    """Elements of a unit on the rank with this shard index, without padding."""
    params = content.params
    return sum(chunk(param.shape[0], shards, index)[1] * prod(param.shape[1:]) * count for param, count in params)


def _state(inputs: Inputs, shards: int, index: int) -> StateBytes | None:
    """Optimizer state on the ranks with this shard index; None: there is none, or it is not predicted."""
    bytes_of = state_formula(inputs.optimizer) if inputs.optimizer and inputs.trains else None
    if bytes_of is None or inputs.optimizer is None:
        return None
    state = StateBytes(0)
    for content, units in inputs.counted.items():
        for param, count in inputs.contents[content].params:
            if param.group is not None:
                local = (chunk(param.shape[0], shards, index)[1], *param.shape[1:])
                state += bytes_of(local, param.shape, param.size, param.group) * (count * units)
    for param, count in inputs.whole:
        if param.group is not None:
            state += bytes_of(param.shape, param.shape, param.size, param.group) * count
    return state


def _kept(inputs: Inputs, sizes: tuple[ShardSizes, ...]) -> tuple[Term, ...]:
    place = replicated.at_rest(inputs)
    kept: tuple[Term, ...] = (
        Term(category="parameters", bytes=summed(inputs, sizes, "kept"), what="padded shards", place=place),
    )
    if inputs.whole:
        size = sum(param.numel * param.size * count for param, count in inputs.whole)
        kept += (Term(category="parameters", bytes=size, what="what no unit shards, whole on every rank"),)
    if not inputs.trains:
        return kept
    # Offloaded gradients are copied one by one and lose their padding, which only a device can show.
    grads = Term(
        category="gradients",
        bytes=summed(inputs, sizes, "grads"),
        what="padded shards",
        label=Label.BOUNDED if place == "host" else Label.EXACT,
        place=place,
        lifetime=Lifetime.STEP,
    )
    size = sum(param.numel * param.size * count for param, count in inputs.whole if param.trains)
    if size:
        what = "of what no unit shards"
        kept += (Term(category="gradients", bytes=size, what=what, lifetime=Lifetime.STEP),)
    return (*kept, grads)


def _averaged(inputs: Inputs) -> int:
    """Bytes of what is sent to average the gradients of whole parameters: they, and a number for each (``average``)."""
    trained = [(param, count) for param, count in inputs.whole if param.trains]
    size = max((FLOAT32, *(param.size for param, _ in trained)))
    return sum((param.numel + 1) * count for param, count in trained) * size if inputs.trains else 0


def _averaging(inputs: Inputs) -> tuple[Term, ...]:
    ranks = inputs.axis("shard") * inputs.axis("replicate")
    if ranks == 1 or not _averaged(inputs):
        return ()
    return (working(_averaged(inputs), "gradients that no unit reduces, end to end"),)


def _averages(inputs: Inputs) -> tuple[Traffic, ...]:
    """One all-reduce per axis and optimizer step."""
    shards, tensor = inputs.axis("shard"), inputs.axis("tensor")
    strides = {"shard": tensor, "replicate": shards * tensor}
    return tuple(
        Traffic(
            collective="all-reduce",
            what="gradients of whole parameters",
            calls=1,
            bytes=_averaged(inputs),
            ranks=inputs.axis(axis),
            axis=axis,
            stride=stride,
        )
        for axis, stride in strides.items()
        if inputs.axis(axis) > 1 and _averaged(inputs)
    )


def _replica_sums(inputs: Inputs, sizes: tuple[ShardSizes, ...]) -> tuple[Term, ...]:
    """Torch keeps what it averages over the replicas where it casts the gradients (``foreach_reduce``)."""
    casts = inputs.reduced_size is not None and any(
        param.size != inputs.reduced_size for content in inputs.contents for param, _ in content.params
    )
    if inputs.axis("replicate") == 1 or not casts or not inputs.trains:
        return ()
    size = summed(inputs, sizes, "reduced") // inputs.axis("shard")
    return (working(size, "all-reduce of every unit, kept until backward ends"),) if size else ()
