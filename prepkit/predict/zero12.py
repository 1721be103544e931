"""ZeRO 1 and 2: the parameters of an optimizer group lie end to end, whole on every rank; each steps its part of them.

Read in DeepSpeed 0.19.8 ``runtime/zero/stage_1_and_2.py`` and ``runtime/bf16_optimizer.py``. What a rank keeps of the
gradients follows the dtype in which they add up. In float32 beside parameters of 16 bits it is a buffer of the part's
size. Otherwise it is the whole gradient of every parameter that lies in the part, however little of it does: ranks
differ, and a large embedding is whole on each of the ranks that share it.
"""

from __future__ import annotations

from itertools import accumulate

from attrs import frozen

from prepkit.plan.flat_layout import round_up
from prepkit.predict.inputs import Inputs
from prepkit.predict.prediction import Label, Lifetime, RankClass, Term
from prepkit.predict.zero_inputs import Zero
from prepkit.predict.zero_terms import MASTER, host, locked, state, term, working


def padded(zero: Zero, numel: int) -> int:
    """Elements of a group of ``numel``, padded to a multiple of twice the ranks (``nccl_start_alignment_factor``)."""
    return round_up(numel, 2 * zero.ranks)


def flat(zero: Zero) -> int:
    """Elements of all optimizer groups, each padded: what every rank holds of the trained parameters."""
    return sum(padded(zero, sum(numels)) for numels in zero.groups)


def parts(zero: Zero) -> tuple[int, ...]:
    """Elements of each group that one rank steps, padding included."""
    return tuple(padded(zero, sum(numels)) // zero.ranks for numels in zero.groups)


def classes(inputs: Inputs, zero: Zero) -> tuple[RankClass, ...]:
    """What ranks hold. They differ where they keep whole gradients, and where an offloading rank has padding only."""
    shared = (*_kept(inputs, zero), *_training(inputs, zero))
    if (
        not inputs.trains
        or inputs.optimizer is None
        or zero.bf16_optimizer
        or (zero.compact and not zero.offload_state)
    ):
        return (_class(0, 0, inputs.world_size, shared),)
    starts: list[tuple[int, tuple[Term, ...]]] = []
    for run in overlaps(zero):
        terms = _gradients(inputs, zero, run)
        starts += [(run.first, terms)] if not starts or starts[-1][1] != terms else []
    ends = [*(first for first, _ in starts[1:]), zero.ranks]
    replicas = inputs.world_size // zero.ranks
    return tuple(
        _class(first, end - 1, (end - first) * replicas, (*shared, *terms))
        for (first, terms), end in zip(starts, ends, strict=True)
    )


def _class(first: int, last: int, ranks: int, terms: tuple[Term, ...]) -> RankClass:
    return RankClass(first=first, last=last, ranks=ranks, terms=tuple(entry for entry in terms if entry.bytes))


@frozen
class Run:
    """Consecutive ranks whose parts hold equal numbers of elements."""

    first: int
    """The first of these ranks; they end where the next run begins."""
    touched: int
    """Elements of all parameters of which any element lies in the rank's parts; such a parameter counts whole."""
    padding: int
    """Elements of padding at the end of the rank's parts."""
    used: int
    """Elements of those of the rank's parts in which any parameter lies, padding included."""


def overlaps(zero: Zero) -> list[Run]:
    """All ranks as runs, from rank 0 on.

    A group of ``n`` elements is cut into parts of ``p`` for the ranks in turn, so a parameter from element ``s`` up to
    ``e`` is touched by the ranks ``s // p`` to ``(e - 1) // p``; ranks from ``n // p`` on have padding, and those from
    ``ceil(n / p)`` on have nothing else. What begins or ends is noted at the rank where it does, then summed from
    rank 0 on: linear in the parameters, whatever the number of ranks (DeepSpeed ``get_partition_info``).
    """
    changes: dict[int, list[int]] = {0: [0, 0, 0]}

    def change(rank: int, column: int, by: int) -> None:
        changes.setdefault(rank, [0, 0, 0])[column] += by

    touched, padding, used = range(3)
    for numels, part in zip(zero.groups, parts(zero), strict=True):
        if not part:
            continue  # a group of parameters without elements
        for numel, end in zip(numels, accumulate(numels), strict=True):
            change((end - numel) // part, touched, numel)
            change((end - 1) // part + 1, touched, -numel)
        total = sum(numels)
        first = total // part
        change(first, padding, (first + 1) * part - total)
        change(first + 1, padding, total - first * part)
        change(0, used, part)
        change(-(-total // part), used, -part)
    runs: list[Run] = []
    sums = (0, 0, 0)
    for rank, by in sorted(changes.items()):
        sums = (sums[0] + by[0], sums[1] + by[1], sums[2] + by[2])
        if rank < zero.ranks and (not runs or (runs[-1].touched, runs[-1].padding, runs[-1].used) != sums):
            runs.append(Run(rank, *sums))
    return runs


def _kept(inputs: Inputs, zero: Zero) -> tuple[Term, ...]:
    untrained = sum(numel for numel, trains in zero.numels if not trains)
    terms = [term("parameters", (flat(zero) + untrained) * zero.size, "whole on every rank, end to end")]
    if not inputs.trains or inputs.optimizer is None:
        return tuple(terms)
    mine = sum(parts(zero))
    place = host(inputs, away=zero.offload_state)
    masters = term("master weights", mine * MASTER, "float32 copy of a part", place)
    if zero.offload_state:
        masters = locked(inputs, "master weights", mine * MASTER, "float32 copy of a part", pins=zero.pins_state)
    return (*terms, masters, *state(inputs, zero, parts(zero)))


def _training(inputs: Inputs, zero: Zero) -> tuple[Term, ...]:
    if not inputs.trains or inputs.optimizer is None:
        return ()
    if zero.bf16_optimizer:
        return _float32_gradients(zero)
    mine, doubles = sum(parts(zero)), zero.stage == 1 and zero.size != zero.grad_size
    terms = [*_transient(inputs, zero, doubles=doubles)]
    if zero.compact and not zero.offload_state:
        terms.append(_part(mine))
    elif not zero.offload_state:
        cast = MASTER if zero.grad_size != MASTER else 0
        what = "gradients of a part, end to end and in float32, while it is stepped"
        terms.append(working(mine * (zero.grad_size + cast), what, lifetime=Lifetime.STEP))
    if zero.offload_state:
        terms += _offloaded(inputs, zero, mine)
        if doubles:
            what = "the reduce bucket, in which gradients of other parts stay until the step"
            terms.append(working(zero.bucket * zero.grad_size, what, lifetime=Lifetime.STEP))
    return tuple(terms)


def _float32_gradients(zero: Zero) -> tuple[Term, ...]:
    """``BF16_Optimizer``; a flat buffer is all-reduced as it is where it is the only one, and else copied."""
    everything, copied = flat(zero), (MASTER if len(zero.groups) > 1 else 0)
    copied += zero.sent_size if zero.sent_size != MASTER else 0
    kept = Label.BOUNDED if zero.at_once else Label.EXACT
    return (
        term("gradients", everything * MASTER, "float32, of all parameters, from the start"),
        term(
            "gradients",
            zero.stepped * zero.size,
            "of all parameters, until the step",
            label=kept,
            lifetime=Lifetime.STEP,
        ),
        working(everything * copied, "gradients as they are sent", lifetime=Lifetime.STEP),
    )


def _transient(inputs: Inputs, zero: Zero, *, doubles: bool) -> tuple[Term, ...]:
    """Within backward: the reduce bucket, its copy while it is sent, and gradients that are not in it yet."""
    element = zero.grad_size if doubles else zero.size
    turns = 2 if zero.overlaps else 1
    terms = [working(zero.bucket * turns * element, "reduce bucket, made in backward", Label.EXACT)]
    sent = max(min(zero.bucket, zero.stepped), zero.largest)
    cast = zero.sent_size if zero.sent_size != element else 0
    terms.append(working(sent * (element + cast), "gradients as they are sent"))
    if zero.stage == 1:
        at_end = not zero.overlaps or inputs.accumulation > 1
        label = Label.EXACT if at_end else Label.BOUNDED
        what = "of all parameters, until they are reduced"
        terms.append(term("gradients", zero.stepped * element, what, label=label, lifetime=Lifetime.PASS))
    terms.append(working(zero.largest * zero.size, "gradient of one parameter, as it comes"))
    return tuple(terms)


def _offloaded(inputs: Inputs, zero: Zero, mine: int) -> tuple[Term, ...]:
    """What the offload of optimizer state allocates when it is built, and keeps."""
    pins = zero.pins_state
    return (
        locked(inputs, "gradients", mine * MASTER, "float32, of a part, from the start", pins=pins),
        locked(inputs, "buckets", mine * zero.size, "a part on its way back", pins=pins),
        locked(inputs, "buckets", zero.largest * zero.size, "one gradient on its way, on the host", pins=pins),
        term("buckets", zero.largest * zero.size, "one gradient on its way"),
    )


def _part(elements: int) -> Term:
    return term("gradients", elements * MASTER, "float32, of a part, until the step", lifetime=Lifetime.STEP)


def _gradients(inputs: Inputs, zero: Zero, run: Run) -> tuple[Term, ...]:
    """Gradients on the ranks of a run: of their parts where they add up in float32, else whole ones that touch them."""
    if zero.compact:
        return (_part(run.used),)
    label = Label.EXACT if zero.size == zero.grad_size else Label.BOUNDED
    several = inputs.accumulation > 1 and zero.stage == 2  # at stage 1 they add up where autograd makes them
    size = run.touched * max(zero.size, zero.grad_size)
    if zero.offload_state:
        what = "of parameters that lie in the part, whole, of the micro-batches so far"
        kept = locked(inputs, "gradients", size if several else 0, what, pins=zero.pins_state)
        return (kept, working(size, "gradients of parameters that lie in the part, whole"))
    what = "of parameters that lie in the part, whole, until the step"
    kept = term("gradients", size + run.padding * zero.grad_size, what, label=label, lifetime=Lifetime.STEP)
    more = working(size if several else 0, "the same, of one micro-batch more", label)
    return (kept, more)
