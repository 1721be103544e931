"""Bytes that a rank holds under ZeRO.

Read in ``stage_1_and_2.py``, ``stage3.py``, ``partition_parameters.py`` and ``partitioned_param_coordinator.py`` of
DeepSpeed 0.19.8's ``runtime/zero``, and in its ``runtime/bf16_optimizer.py``.

ZeRO 1 and 2: the parameters of an optimizer group lie end to end, whole on every rank; each steps its part of them.
What a rank keeps of the gradients follows the dtype in which they add up. In float32 beside parameters of 16 bits it is
a buffer of the part's size. Otherwise it is the whole gradient of every parameter that lies in the part, however little
of it does: ranks differ, and a large embedding is whole on each of the ranks that share it.

ZeRO 3: every parameter is padded by itself and cut; it is gathered around the modules that use it.
"""

from __future__ import annotations

from itertools import accumulate

from attrs import frozen

from prepkit.plan.layout import chunk_rows, round_up
from prepkit.predict import replicated
from prepkit.predict.inputs import Inputs
from prepkit.predict.optimizers import StateBytes, state_formula, steps_on_device
from prepkit.predict.prediction import Category, Label, Lifetime, Place, RankClass, Term
from prepkit.predict.zero import Zero

# --- terms of every stage --------------------------------------------------------------------------------------------


MASTER = 4
"""Bytes of one element of the float32 copy that is stepped; there is one also of a float32 model."""


def term(
    category: Category,
    size: int,
    what: str,
    place: Place = "device",
    label: Label = Label.EXACT,
    lifetime: Lifetime = Lifetime.ALWAYS,
) -> Term:
    """A ``Term``; what most terms have need not be said."""
    return Term(category=category, bytes=size, what=what, place=place, label=label, lifetime=lifetime)


def working(size: int, what: str, label: Label = Label.BOUNDED, lifetime: Lifetime = Lifetime.PASS) -> Term:
    """A buffer that is allocated and freed within a step."""
    return term("working buffers", size, what, label=label, lifetime=lifetime)


def host(inputs: Inputs, *, away: bool) -> Place:
    """Return where offloaded tensors are; on a CPU there is one memory."""
    return "host" if away and inputs.device != "cpu" else "device"


def locked(inputs: Inputs, category: Category, size: int, what: str, *, pins: bool = True) -> Term:
    """Bytes in host memory that are page-locked for an accelerator: torch rounds such a block up to a power of two.

    ``CachingHostAllocatorImpl::allocate``; on a CPU DeepSpeed locks nothing, and the number is exact.
    """
    rounds = pins and inputs.device != "cpu" and size > 0
    label = Label.BOUNDED if rounds else Label.EXACT
    allocated = 1 << (size - 1).bit_length() if rounds else size
    return term(category, allocated, what, host(inputs, away=True), label)


def state(inputs: Inputs, zero: Zero, parts: tuple[int, ...]) -> tuple[Term, ...]:
    """Optimizer state of the float32 master weights, one flat tensor of so many elements for each of ``parts``."""
    bytes_of = state_formula(inputs.optimizer) if inputs.optimizer else None
    if bytes_of is None or inputs.optimizer is None:
        return ()
    total = StateBytes(0)
    for part in parts:
        total += bytes_of((part,), (part,), MASTER, 0)
    place = host(inputs, away=zero.offload_state)
    counters = "device" if steps_on_device(inputs.optimizer) else host(inputs, away=True)
    kept = term("optimizer state", total.bytes, f"of {inputs.optimizer.name}, float32", place, total.label)
    return (kept, term("optimizer state", total.step, "step counters", counters, total.label))


# --- ZeRO 1 and 2 -----------------------------------------------------------------------------------------------------


def padded(zero: Zero, numel: int) -> int:
    """Elements of a group of ``numel``, padded to a multiple of twice the ranks (``nccl_start_alignment_factor``)."""
    return round_up(numel, 2 * zero.ranks)


def flat(zero: Zero) -> int:
    """Elements of all optimizer groups, each padded: what every rank holds of the trained parameters."""
    return sum(padded(zero, sum(numels)) for numels in zero.groups)


def parts(zero: Zero) -> tuple[int, ...]:
    """Elements of each group that one rank steps, padding included."""
    return tuple(padded(zero, sum(numels)) // zero.ranks for numels in zero.groups)


def classes_zero12(inputs: Inputs, zero: Zero) -> tuple[RankClass, ...]:
    """What ranks hold. They differ where they keep whole gradients, and where an offloading rank has padding only."""
    shared = (*_kept_zero12(inputs, zero), *_training_zero12(inputs, zero))
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
    """Consecutive ranks whose parts hold equal numbers of elements; so may those of the next run."""

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
        if rank < zero.ranks:
            runs.append(Run(rank, *sums))
    return runs


def _kept_zero12(inputs: Inputs, zero: Zero) -> tuple[Term, ...]:
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


def _training_zero12(inputs: Inputs, zero: Zero) -> tuple[Term, ...]:
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
    """Return what the offload of optimizer state allocates when it is built, and keeps."""
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


# --- ZeRO 3 ----------------------------------------------------------------------------------------------------------


def part(zero: Zero, *, trained: bool) -> int:
    """Elements that each rank holds, padding included: of all parameters, or of the trained ones."""
    return sum(chunk_rows(numel, zero.ranks) for numel, trains in zero.numels if trains or not trained)


def stepped_at_once(zero: Zero) -> tuple[int, ...]:
    """Elements of the float32 tensors that a rank steps one after the other (``_create_fp16_sub_groups``)."""
    sub_groups: list[int] = []
    for numels in zero.groups:
        filled = 0
        for numel in numels:
            filled += chunk_rows(numel, zero.ranks)
            if filled >= zero.sub_group:
                sub_groups, filled = [*sub_groups, filled], 0
        sub_groups += [filled] if filled else []
    return tuple(sub_groups)


def small(zero: Zero) -> int:
    """Elements of the parameters that stay gathered (at most ``persistent`` elements each), padded to the ranks."""
    return sum(round_up(numel, zero.ranks) for numel, _ in zero.numels if numel <= zero.persistent)


def gathered_once(zero: Zero) -> bool:
    """Whether every parameter stays gathered until backward: all that runs between is nearer than the reuse distance.

    ``__params_to_release`` walks the modules that run next, forward and backward, until it has passed so many elements.
    """
    return 2 * sum(numel for numel, _ in zero.numels) < zero.reuse


def classes_zero3(inputs: Inputs, zero: Zero) -> tuple[RankClass, ...]:
    """All ranks hold equally many bytes: every parameter is padded to a multiple of the ranks."""
    terms = tuple(entry for entry in (*_parameters_zero3(inputs, zero), *_training_zero3(inputs, zero)) if entry.bytes)
    return replicated.one_class(inputs, terms)


def _parameters_zero3(inputs: Inputs, zero: Zero) -> tuple[Term, ...]:
    size = part(zero, trained=False) * zero.size
    parts = locked(inputs, "parameters", size, "parts") if zero.offload_params else term("parameters", size, "parts")
    sharded = [numel for numel, _ in zero.numels if numel > zero.persistent]
    gathered = min(sum(sharded), max(zero.live, zero.reuse) + zero.module) + zero.ranks * len(sharded)  # and padding
    what = "gathered parameters, at most as many as may be live"
    return (
        parts,
        term("parameters", small(zero) * zero.size, "small ones, whole on every rank"),
        term("gathered units", gathered * zero.size, what, label=Label.BOUNDED, lifetime=Lifetime.PASS),
    )


def _training_zero3(inputs: Inputs, zero: Zero) -> tuple[Term, ...]:
    if not inputs.trains or inputs.optimizer is None:
        return ()
    mine = part(zero, trained=True)
    place = host(inputs, away=zero.offload_state)
    trained = sum(numel for numel, trains in zero.numels if trains)
    sent = max(min(zero.bucket, trained), zero.largest) + zero.ranks * len(zero.numels)  # each is padded to the ranks
    terms = [
        term("master weights", mine * MASTER, "float32 copy of the part", place),
        *state(inputs, zero, stepped_at_once(zero)),
        term("buckets", zero.bucket * zero.sent_size, "reduce bucket, from the start"),
        working(sent * zero.sent_size, "gradients as they are sent"),
        working(zero.largest * zero.size, "gradient of one parameter, as it comes"),
    ]
    what = "of the part, from the start"
    if not zero.offload_state:
        cast = MASTER if zero.grad_size != MASTER else 0
        copied = working(
            mine * (zero.grad_size + cast),
            "gradients of the part, end to end, while it is stepped",
            lifetime=Lifetime.STEP,
        )
        return (*terms, term("gradients", mine * zero.grad_size, what), copied)
    pins = zero.pins_state
    return (
        *terms,
        locked(inputs, "gradients", mine * zero.grad_size, what, pins=pins),
        locked(inputs, "gradients", mine * MASTER, "float32, of the part, from the start", pins=pins),
    )
