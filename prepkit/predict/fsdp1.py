"""Flat parameters (torch ``FullyShardedDataParallel``): those of a unit lie end to end, and are cut evenly.

With original parameters every one of them begins at a multiple of 16 bytes *of the compute dtype*, so mixed precision
moves the borders (``FlatParamHandle._get_aligned_numel``). The plan's layout says where each begins; how the whole is
filled up and cut follows from the mesh alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property

from attrs import define

from prepkit.predict import notes, replicated
from prepkit.predict.inputs import Inputs
from prepkit.predict.optimizers import Rule, State, rule_of
from prepkit.predict.prediction import Label, Moment, Prediction, RankClass, Term
from prepkit.predict.traffic import traffic
from prepkit.predict.transient import passing, summed, working
from prepkit.predict.unit_contents import Content, Held

FLOAT32 = 4
"""Bytes of an element that is computed in full precision."""


@define(frozen=True, slots=False)
class FlatSizes:
    """The sizes of one kind of unit, in bytes; modules that the wrapper ignores count as kept, and as nothing else."""

    content: Content
    job: Inputs

    @property
    def cut(self) -> bool:
        """Whether ranks hold parts; under ``NO_SHARD`` the mesh has copies only."""
        return any(axis.name == "shard" for axis in self.job.mesh)

    @cached_property
    def placed(self) -> tuple[tuple[Held, int], ...]:
        """What is in the flat parameter, with where it begins, in that order."""
        return tuple((one, one.start) for one, _ in self.content.held if one.start is not None)

    @cached_property
    def end(self) -> int:
        """Elements from the first to the last parameter."""
        return max((start + one.numel for one, start in self.placed), default=0)

    @cached_property
    def whole(self) -> int:
        """Elements of the flat parameter, filled up to a multiple of the ranks that share it."""
        fill = self.job.mesh[-1].size if self.cut or self.job.original else 1
        return -(-self.end // fill) * fill

    @cached_property
    def part(self) -> int:
        """Elements on every rank, padding included."""
        return self.whole // (self.job.axis("shard") if self.cut else 1)

    @cached_property
    def stored(self) -> int:
        """Bytes of an element as stored; a flat parameter has one dtype."""
        return self.placed[0][0].size if self.placed else 0

    @cached_property
    def computed(self) -> int:
        """Bytes of an element while it is gathered."""
        return FLOAT32 if self.content.full else self.job.gathered_size or self.stored

    @cached_property
    def sent(self) -> int:
        """Bytes of an element while it is reduced."""
        return FLOAT32 if self.content.full else self.job.reduced_size or self.computed

    @cached_property
    def trains(self) -> bool:
        """Whether the flat parameter gets a gradient."""
        return any(one.trains for one, _ in self.placed)

    @cached_property
    def ignored(self) -> int:
        """What every rank keeps whole, beside the flat parameter."""
        return sum(one.numel * one.size * n for one, n in self.content.held if one.start is None)

    @cached_property
    def kept(self) -> int:
        """Part of the flat parameter as stored, and what is ignored."""
        return self.part * self.stored + self.ignored

    @cached_property
    def grads(self) -> int:
        """As much as the part, frozen parameters inside and padding included; and those of ignored parameters."""
        alone = sum(one.numel * one.size * n for one, n in self.content.held if one.start is None and one.trains)
        return (self.part * self.stored if self.trains else 0) + alone

    @cached_property
    def gathered(self) -> int:
        """The whole in the compute dtype; 0 where every rank holds it anyway."""
        return self.whole * self.computed if self.cut else 0

    @cached_property
    def reduced(self) -> int:
        """Input of the reduce-scatter, or of the all-reduce where nothing is cut."""
        return self.whole * self.sent if self.trains else 0

    @cached_property
    def whole_grads(self) -> int:
        """As autograd makes it; without original parameters the padding of the cut is not part of it."""
        return (self.whole if self.job.original else self.end) * self.computed if self.trains else 0

    @cached_property
    def summed_grads(self) -> int:
        """Torch sums in the compute dtype under ``no_sync``; where nothing is cut that is the gradient itself."""
        return self.whole_grads if self.cut else 0


def predict_fsdp1(job: Inputs) -> Prediction:
    """Bytes of the ``FSDP1`` engine under every sharding strategy, with and without original parameters."""
    sizes = tuple(FlatSizes(content, job) for content in job.contents)
    shared = (*_kept(job, sizes), *replicated.module_buffers(job), *passing(job, sizes), *_low(job, sizes))
    made = Prediction(
        engine=job.engine,
        world_size=job.world_size,
        shards=job.axis("shard"),
        classes=tuple(_classes(job, sizes, shared)),
        traffic=traffic(job, sizes),
        not_predicted=replicated.not_predicted(job),
    )
    return notes.of_flat(job, made)


def _kept(job: Inputs, sizes: tuple[FlatSizes, ...]) -> tuple[Term, ...]:
    place = replicated.at_rest(job)
    ignored = summed(job, sizes, "ignored")
    flat = summed(job, sizes, "kept") - ignored
    found = [Term(category="parameters", bytes=flat, what="parts of flat parameters", place=place)]
    if ignored:
        found.append(Term(category="parameters", bytes=ignored, what="ignored modules, whole on every rank"))
    if job.trains and (grads := summed(job, sizes, "grads")):
        found.append(
            Term(category="gradients", bytes=grads, what="as their parameters", place=place, moment=Moment.STEP)
        )
    return tuple(found)


def _low(job: Inputs, sizes: tuple[FlatSizes, ...]) -> tuple[Term, ...]:
    """The part in the compute dtype, which is what is gathered; not cut, that of all units stays while they run."""
    cast = [size for size in sizes if size.computed != size.stored and size.placed]
    if not cast:
        return ()
    if not cast[0].cut:
        every = sum(sizes[i].whole * sizes[i].computed * n for i, n in job.counted.items() if sizes[i] in cast)
        return (working(every, "parameters in the compute dtype"),)
    largest = max(size.part * size.computed for size in cast)
    return (working(largest, "a part in the compute dtype, before it is gathered"),)


# --- ranks ---------------------------------------------------------------------------------------------------------


def _classes(job: Inputs, sizes: tuple[FlatSizes, ...], shared: tuple[Term, ...]) -> Iterator[RankClass]:
    """Runs of ranks that hold alike: only where a parameter lies across a border of the parts do they differ.

    Changes are counted on the rank where they happen, so that the work is linear in the parameters.
    """
    shards, copies = job.axis("shard"), job.world_size // job.axis("shard")
    changes: dict[int, Counter[str]] = {0: Counter()}
    label = Label.EXACT
    for content, times in job.counted.items():
        for index, used, state in _changes(job, sizes[content], shards):
            change = changes.setdefault(index, Counter())
            for name, value in (("used", used), ("bytes", state.bytes), ("step", state.step)):
                change[name] += value * times
            label = max(label, state.label, key=tuple(Label).index)
    starts, held = sorted(changes), Counter[str]()
    for first, after in zip(starts, [*starts[1:], shards], strict=True):
        held.update(changes[first])
        state = State(held["bytes"], held["step"], label)
        yield RankClass(
            first=first,
            last=after - 1,
            ranks=(after - first) * copies,
            terms=(*shared, *replicated.optimizer_state(job, state if rule(job) else None)),
            empty=not held["used"],
        )


def rule(job: Inputs) -> Rule | None:
    """The formula of the optimizer; None: there is none, or it is not predicted."""
    return rule_of(job.optimizer) if job.optimizer and job.trains else None


def _changes(job: Inputs, size: FlatSizes, shards: int) -> Iterator[tuple[int, int, State]]:
    """Index of the part, and how much more of parameters (elements) and of optimizer state it holds than the last."""
    options = [dict(group) for group in job.optimizer.groups] if job.optimizer else []
    made = rule(job)
    for one, times in size.content.held:
        if one.start is None:
            alone = made(one.shape, one.shape, one.size, options[one.group]) if made and one.group is not None else None
            yield 0, one.numel * times, (alone or State(0)) * times
    group = next((one.group for one, _ in size.placed if one.group is not None), None)
    if made and group is not None and not job.original:
        yield 0, 0, made((size.part,), (size.part,), size.stored, options[group])
    for one, start in size.placed:
        steps = made if job.original and one.group is not None else None
        used, before = 0, State(0)
        for index in _cuts(size, start, start + one.numel, shards):
            low, high = (index * size.part, (index + 1) * size.part) if size.cut else (0, size.whole)
            here = max(0, min(start + one.numel, high) - max(start, low))
            local = (here,) if size.cut else one.shape
            state = steps(local, local, one.size, options[one.group or 0]) if steps and here else State(0)
            yield index, here - used, State(state.bytes - before.bytes, state.step - before.step, state.label)
            used, before = here, state


def _cuts(size: FlatSizes, start: int, end: int, shards: int) -> list[int]:
    """The parts from which on more or less of this span is held than of the part before."""
    if not size.cut or not size.part:
        return [0]
    borders = (start // size.part, end // size.part)
    return sorted({cut for border in borders for cut in (border, border + 1) if cut < shards} | {0})
