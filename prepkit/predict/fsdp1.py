"""Flat parameters (torch ``FullyShardedDataParallel``): those of a unit lie end to end, cut into equal shards.

With original parameters every one of them begins at a multiple of 16 bytes *of the compute dtype*, so mixed precision
moves the borders (``FlatParamHandle._get_aligned_numel``). The plan's layout says where each begins; the padding at
the end and the shards follow from the mesh alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property

from attrs import define

from prepkit.plan.layout import round_up
from prepkit.predict import notes, replicated
from prepkit.predict.inputs import Inputs
from prepkit.predict.optimizers import GroupFormula, StateBytes, state_formula
from prepkit.predict.prediction import Label, Lifetime, Prediction, RankClass, Term
from prepkit.predict.traffic import traffic
from prepkit.predict.transient import summed, transient, working
from prepkit.predict.unit_contents import ParamKind, UnitContent

FLOAT32 = 4
"""Bytes of an element that is computed in full precision."""


@define(frozen=True, slots=False)
class FlatSizes:
    """``UnitSizes`` of one FSDP1 unit; parameters of ignored modules are in ``kept`` and ``grads`` alone."""

    content: UnitContent
    inputs: Inputs

    @property
    def sharded(self) -> bool:
        """Whether ranks hold shards; under ``NO_SHARD`` the mesh has replicas only."""
        return any(axis.name == "shard" for axis in self.inputs.mesh)

    @cached_property
    def placed(self) -> tuple[tuple[ParamKind, int], ...]:
        """The parameters in the flat parameter, each with its first element there, in their order."""
        return tuple((param, param.start) for param, _ in self.content.params if param.start is not None)

    @cached_property
    def end(self) -> int:
        """Elements from the first to the last parameter."""
        return max((start + param.numel for param, start in self.placed), default=0)

    @cached_property
    def padded(self) -> int:
        """Elements of the flat parameter with padding, up to a multiple of the ranks that share it."""
        multiple = self.inputs.mesh[-1].size if self.sharded or self.inputs.original else 1
        return round_up(self.end, multiple)

    @cached_property
    def shard(self) -> int:
        """Elements of the flat parameter on every rank, padding included."""
        return self.padded // (self.inputs.axis("shard") if self.sharded else 1)

    @cached_property
    def stored(self) -> int:
        """Bytes of an element as stored; a flat parameter has one dtype."""
        return self.placed[0][0].size if self.placed else 0

    @cached_property
    def computed(self) -> int:
        """Bytes of an element while it is gathered."""
        return FLOAT32 if self.content.full else self.inputs.gathered_size or self.stored

    @cached_property
    def sent(self) -> int:
        """Bytes of an element while it is reduced."""
        return FLOAT32 if self.content.full else self.inputs.reduced_size or self.computed

    @cached_property
    def trains(self) -> bool:
        """Whether the flat parameter gets a gradient."""
        return any(param.trains for param, _ in self.placed)

    @cached_property
    def ignored(self) -> int:
        """Bytes of the parameters of ignored modules, which every rank keeps whole beside the flat parameter."""
        return sum(param.numel * param.size * count for param, count in self.content.params if param.start is None)

    @cached_property
    def kept(self) -> int:
        """The shard of the flat parameter as stored, and the ignored parameters."""
        return self.shard * self.stored + self.ignored

    @cached_property
    def grads(self) -> int:
        """As much as the shard, frozen parameters inside and padding included; and those of ignored parameters."""
        left_out = ((param, count) for param, count in self.content.params if param.start is None and param.trains)
        ignored = sum(param.numel * param.size * count for param, count in left_out)
        return (self.shard * self.stored if self.trains else 0) + ignored

    @cached_property
    def gathered(self) -> int:
        """The whole flat parameter in the compute dtype; 0 where every rank holds it anyway."""
        return self.padded * self.computed if self.sharded else 0

    @cached_property
    def reduced(self) -> int:
        """Input of the reduce-scatter, or of the all-reduce where nothing is sharded."""
        return self.padded * self.sent if self.trains else 0

    @cached_property
    def unsharded_grads(self) -> int:
        """As autograd makes it; without original parameters the padding at the end is not part of it."""
        return (self.padded if self.inputs.original else self.end) * self.computed if self.trains else 0

    @cached_property
    def summed_grads(self) -> int:
        """Torch sums in the compute dtype under ``no_sync``; where nothing is sharded that is the gradient itself."""
        return self.unsharded_grads if self.sharded else 0


def predict_fsdp1(inputs: Inputs) -> Prediction:
    """Bytes of the ``FSDP1`` engine under every sharding strategy, with and without original parameters."""
    sizes = tuple(FlatSizes(content, inputs) for content in inputs.contents)
    shared = (
        *_kept(inputs, sizes),
        *replicated.module_buffers(inputs),
        *transient(inputs, sizes),
        *_low_precision(inputs, sizes),
    )
    prediction = Prediction(
        engine=inputs.engine,
        world_size=inputs.world_size,
        shards=inputs.axis("shard"),
        classes=tuple(_classes(inputs, sizes, shared)),
        traffic=traffic(inputs, sizes),
        not_predicted=replicated.not_predicted(inputs),
    )
    return notes.of_flat(inputs, prediction)


def _kept(inputs: Inputs, sizes: tuple[FlatSizes, ...]) -> tuple[Term, ...]:
    place = replicated.at_rest(inputs)
    ignored = summed(inputs, sizes, "ignored")
    flat = summed(inputs, sizes, "kept") - ignored
    terms = [Term(category="parameters", bytes=flat, what="parts of flat parameters", place=place)]
    if ignored:
        terms.append(Term(category="parameters", bytes=ignored, what="ignored modules, whole on every rank"))
    if inputs.trains and (grads := summed(inputs, sizes, "grads")):
        terms.append(
            Term(category="gradients", bytes=grads, what="as their parameters", place=place, lifetime=Lifetime.STEP)
        )
    return tuple(terms)


def _low_precision(inputs: Inputs, sizes: tuple[FlatSizes, ...]) -> tuple[Term, ...]:
    """The shard in the compute dtype, which is what is gathered; unsharded, that of all units stays while they run."""
    cast = [size for size in sizes if size.computed != size.stored and size.placed]
    if not cast:
        return ()
    if not cast[0].sharded:
        everything = sum(
            sizes[i].padded * sizes[i].computed * count for i, count in inputs.counted.items() if sizes[i] in cast
        )
        return (working(everything, "parameters in the compute dtype"),)
    largest = max(size.shard * size.computed for size in cast)
    return (working(largest, "a part in the compute dtype, before it is gathered"),)


# --- ranks ---------------------------------------------------------------------------------------------------------


def _classes(inputs: Inputs, sizes: tuple[FlatSizes, ...], shared: tuple[Term, ...]) -> Iterator[RankClass]:
    """Runs of ranks that hold equal bytes: they differ only where a parameter lies across a border between shards.

    What changes from one rank to the next is noted at the rank where it does, and summed from rank 0 on, so the work
    is linear in the parameters whatever the number of ranks.
    """
    shards, replicas = inputs.axis("shard"), inputs.world_size // inputs.axis("shard")
    changes: dict[int, Counter[str]] = {0: Counter()}
    label = Label.EXACT
    for content, units in inputs.counted.items():
        for index, used, state in _changes(inputs, sizes[content], shards):
            change = changes.setdefault(index, Counter())
            for name, value in (("used", used), ("bytes", state.bytes), ("step", state.step)):
                change[name] += value * units
            label = max(label, state.label, key=tuple(Label).index)
    starts, sums = sorted(changes), Counter[str]()
    for first, after in zip(starts, [*starts[1:], shards], strict=True):
        sums.update(changes[first])
        state = StateBytes(sums["bytes"], sums["step"], label)
        yield RankClass(
            first=first,
            last=after - 1,
            ranks=(after - first) * replicas,
            terms=(*shared, *replicated.optimizer_state(inputs, state if formula(inputs) else None)),
            empty=not sums["used"],
        )


def formula(inputs: Inputs) -> GroupFormula | None:
    """The formula of the optimizer; None: there is none, or it is not predicted."""
    return state_formula(inputs.optimizer) if inputs.optimizer and inputs.trains else None


def _changes(inputs: Inputs, size: FlatSizes, shards: int) -> Iterator[tuple[int, int, StateBytes]]:
    """Index of a shard, and by how much its elements of parameters and its optimizer state exceed those of the last."""
    bytes_of = formula(inputs)
    for param, count in size.content.params:
        if param.start is None:
            state = StateBytes(0)
            if bytes_of and param.group is not None:
                state = bytes_of(param.shape, param.shape, param.size, param.group)
            yield 0, param.numel * count, state * count
    group = next((param.group for param, _ in size.placed if param.group is not None), None)
    if bytes_of and group is not None and not inputs.original:
        yield 0, 0, bytes_of((size.shard,), (size.shard,), size.stored, group)
    for param, start in size.placed:
        steps = bytes_of if inputs.original and param.group is not None else None
        used, before = 0, StateBytes(0)
        for index in _borders(size, start, start + param.numel, shards):
            low, high = (index * size.shard, (index + 1) * size.shard) if size.sharded else (0, size.padded)
            inside = max(0, min(start + param.numel, high) - max(start, low))
            local = (inside,) if size.sharded else param.shape
            state = steps(local, local, param.size, param.group or 0) if steps and inside else StateBytes(0)
            yield index, inside - used, StateBytes(state.bytes - before.bytes, state.step - before.step, state.label)
            used, before = inside, state


def _borders(size: FlatSizes, start: int, end: int, shards: int) -> list[int]:
    """Indices of the shards that hold more or less of the elements from start to end than the shard before them."""
    if not size.shard:
        return [0]
    touched = (start // size.shard, end // size.shard)
    return sorted({index for first in touched for index in (first, first + 1) if index < shards} | {0})
