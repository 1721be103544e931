"""ZeRO 1 and 2: the parameters of an optimizer group lie end to end, whole on every rank; each steps a part of them.

Read in DeepSpeed 0.19.8 ``runtime/zero/stage_1_and_2.py`` and ``runtime/bf16_optimizer.py``. What a rank keeps of the
gradients follows the dtype in which they add up. In float32 beside parameters of 16 bits it is a buffer of the part's
size. Otherwise it is the whole gradient of every parameter that lies in the part, however little of it does: ranks
differ, and a large embedding is whole on each of the ranks that share it.
"""

from __future__ import annotations

from itertools import accumulate

from attrs import frozen

from prepkit.predict.inputs import Inputs
from prepkit.predict.prediction import Label, Moment, RankClass, Term
from prepkit.predict.zero_inputs import Zero
from prepkit.predict.zero_terms import MASTER, host, locked, state, term, working


def padded(zero: Zero, numel: int) -> int:
    """Elements of a group of so many, filled up to twice the ranks (``nccl_start_alignment_factor``)."""
    fill = 2 * zero.ranks
    return -(-numel // fill) * fill


def flat(zero: Zero) -> int:
    """Elements that are stepped, padding included."""
    return sum(padded(zero, sum(some)) for some in zero.groups)


def parts(zero: Zero) -> tuple[int, ...]:
    """Elements of every group on one rank, padding included."""
    return tuple(padded(zero, sum(some)) // zero.ranks for some in zero.groups)


def classes(job: Inputs, zero: Zero) -> tuple[RankClass, ...]:
    """What ranks hold. They differ where they keep whole gradients, and offloading, where some have padding only."""
    shared = (*_kept(job, zero), *_training(job, zero))
    if not job.trains or job.optimizer is None or zero.high or (zero.compact and not zero.offload_state):
        return (_class(0, 0, job.world_size, shared),)
    found: list[tuple[int, tuple[Term, ...]]] = []
    for run in overlaps(zero):
        terms = _gradients(job, zero, run)
        found += [(run.first, terms)] if not found or found[-1][1] != terms else []
    ends = [*(first for first, _ in found[1:]), zero.ranks]
    copies = job.world_size // zero.ranks
    return tuple(
        _class(first, end - 1, (end - first) * copies, (*shared, *terms))
        for (first, terms), end in zip(found, ends, strict=True)
    )


def _class(first: int, last: int, ranks: int, found: tuple[Term, ...]) -> RankClass:
    return RankClass(first=first, last=last, ranks=ranks, terms=tuple(one for one in found if one.bytes))


@frozen
class Run:
    """Ranks that are alike, in elements."""

    first: int
    inside: int
    """Of all parameters that lie in the part; one counts whole, however little of it lies there."""
    padding: int
    """Of the part, at its end."""
    used: int
    """Of the part in groups of which it has a parameter."""


def overlaps(zero: Zero) -> list[Run]:
    """All ranks. What changes from one to the next is noted there: linear in the parameters, whatever the ranks."""
    changes: dict[int, list[int]] = {0: [0, 0, 0]}

    def change(rank: int, which: int, by: int) -> None:
        changes.setdefault(rank, [0, 0, 0])[which] += by

    for some, part in zip(zero.groups, parts(zero), strict=True):
        for numel, end in zip(some, accumulate(some), strict=True):
            change((end - numel) // part, 0, numel)
            change((end - 1) // part + 1, 0, -numel)
        total = sum(some)
        first = total // part
        change(first, 1, (first + 1) * part - total)
        change(first + 1, 1, total - first * part)
        change(0, 2, part)
        change(-(-total // part), 2, -part)
    found: list[Run] = []
    held = (0, 0, 0)
    for rank, by in sorted(changes.items()):
        held = (held[0] + by[0], held[1] + by[1], held[2] + by[2])
        if rank < zero.ranks and (not found or (found[-1].inside, found[-1].padding, found[-1].used) != held):
            found.append(Run(rank, *held))
    return found


def _kept(job: Inputs, zero: Zero) -> tuple[Term, ...]:
    still = sum(numel for numel, trains in zero.numels if not trains)
    found = [term("parameters", (flat(zero) + still) * zero.size, "whole on every rank, end to end")]
    if not job.trains or job.optimizer is None:
        return tuple(found)
    mine = sum(parts(zero))
    place = host(job, away=zero.offload_state)
    masters = term("master weights", mine * MASTER, "float32 copy of a part", place)
    if zero.offload_state:
        masters = locked(job, "master weights", mine * MASTER, "float32 copy of a part", pins=zero.pins_state)
    return (*found, masters, *state(job, zero, parts(zero)))


def _training(job: Inputs, zero: Zero) -> tuple[Term, ...]:
    if not job.trains or job.optimizer is None:
        return ()
    if zero.high:
        return _high(zero)
    mine, doubles = sum(parts(zero)), zero.stage == 1 and zero.size != zero.grad_size
    found = [*_passing(job, zero, doubles=doubles)]
    if zero.compact and not zero.offload_state:
        found.append(_part(mine))
    elif not zero.offload_state:
        cast = MASTER if zero.grad_size != MASTER else 0
        what = "gradients of a part, end to end and in float32, while it is stepped"
        found.append(working(mine * (zero.grad_size + cast), what, moment=Moment.STEP))
    if zero.offload_state:
        found += _offloaded(job, zero, mine)
        if doubles:
            what = "the reduce bucket, in which gradients of other parts stay until the step"
            found.append(working(zero.bucket * zero.grad_size, what, moment=Moment.STEP))
    return tuple(found)


def _high(zero: Zero) -> tuple[Term, ...]:
    """``BF16_Optimizer``; a flat buffer is all-reduced as it is where it is the only one, and else copied."""
    everything, copied = flat(zero), (MASTER if len(zero.groups) > 1 else 0)
    copied += zero.sent_size if zero.sent_size != MASTER else 0
    kept = Label.BOUNDED if zero.at_once else Label.EXACT
    return (
        term("gradients", everything * MASTER, "float32, of all parameters, from the start"),
        term(
            "gradients", zero.stepped * zero.size, "of all parameters, until the step", label=kept, moment=Moment.STEP
        ),
        working(everything * copied, "gradients as they are sent", moment=Moment.STEP),
    )


def _passing(job: Inputs, zero: Zero, *, doubles: bool) -> tuple[Term, ...]:
    """Within backward: the bucket, what of it is copied to be sent, and gradients that are not in it yet."""
    held = zero.grad_size if doubles else zero.size
    turns = 2 if zero.overlaps else 1
    found = [working(zero.bucket * turns * held, "reduce bucket, made in backward", Label.EXACT)]
    sent = max(min(zero.bucket, zero.stepped), zero.largest)
    cast = zero.sent_size if zero.sent_size != held else 0
    found.append(working(sent * (held + cast), "gradients as they are sent"))
    if zero.stage == 1:
        at_end = not zero.overlaps or job.accumulation > 1
        label = Label.EXACT if at_end else Label.BOUNDED
        what = "of all parameters, until they are reduced"
        found.append(term("gradients", zero.stepped * held, what, label=label, moment=Moment.PASS))
    found.append(working(zero.largest * zero.size, "gradient of one parameter, as it comes"))
    return tuple(found)


def _offloaded(job: Inputs, zero: Zero, mine: int) -> tuple[Term, ...]:
    """What the offload of optimizer state allocates when it is built, and keeps."""
    pins = zero.pins_state
    return (
        locked(job, "gradients", mine * MASTER, "float32, of a part, from the start", pins=pins),
        locked(job, "buckets", mine * zero.size, "a part on its way back", pins=pins),
        locked(job, "buckets", zero.largest * zero.size, "one gradient on its way, on the host", pins=pins),
        term("buckets", zero.largest * zero.size, "one gradient on its way"),
    )


def _part(elements: int) -> Term:
    return term("gradients", elements * MASTER, "float32, of a part, until the step", moment=Moment.STEP)


def _gradients(job: Inputs, zero: Zero, run: Run) -> tuple[Term, ...]:
    """What these ranks keep: their part, where gradients add up in float32, else whole gradients that lie in it."""
    if zero.compact:
        return (_part(run.used),)
    label = Label.EXACT if zero.size == zero.grad_size else Label.BOUNDED
    several = job.accumulation > 1 and zero.stage == 2  # at stage 1 they add up where autograd makes them
    size = run.inside * max(zero.size, zero.grad_size)
    if zero.offload_state:
        what = "of parameters that lie in the part, whole, of the micro-batches so far"
        found = locked(job, "gradients", size if several else 0, what, pins=zero.pins_state)
        return (found, working(size, "gradients of parameters that lie in the part, whole"))
    what = "of parameters that lie in the part, whole, until the step"
    kept = term("gradients", size + run.padding * zero.grad_size, what, label=label, moment=Moment.STEP)
    more = working(size if several else 0, "the same, of one micro-batch more", label)
    return (kept, more)
