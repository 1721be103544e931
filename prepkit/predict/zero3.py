"""ZeRO 3: every parameter is padded by itself and cut; it is gathered around the modules that use it.

Read in ``stage3.py``, ``partition_parameters.py`` and ``partitioned_param_coordinator.py`` of DeepSpeed 0.19.8's
``runtime/zero``.
"""

from __future__ import annotations

from prepkit.predict.inputs import Inputs
from prepkit.predict.prediction import Label, Moment, RankClass, Term
from prepkit.predict.zero_inputs import Zero
from prepkit.predict.zero_terms import MASTER, host, locked, state, term, working


def part(zero: Zero, *, trained: bool) -> int:
    """Elements on every rank, padding included: of all parameters, or of the trained ones."""
    return sum(-(-numel // zero.ranks) for numel, trains in zero.numels if trains or not trained)


def stepped_at_once(zero: Zero) -> tuple[int, ...]:
    """Elements of the float32 tensors that a rank steps one after the other (``_create_fp16_sub_groups``)."""
    found: list[int] = []
    for some in zero.groups:
        cuts = [-(-numel // zero.ranks) for numel in some]
        held = 0
        for cut in cuts:
            held += cut
            if held >= zero.sub_group and sum(cuts) > zero.sub_group:
                found, held = [*found, held], 0
        found += [held] if held else []
    return tuple(found)


def small(zero: Zero) -> int:
    """Elements of the parameters that are never cut away, each filled up to the ranks, as it is gathered."""
    return sum(-(-numel // zero.ranks) * zero.ranks for numel, _ in zero.numels if numel <= zero.persistent)


def gathered_once(zero: Zero) -> bool:
    """Whether every parameter stays gathered until backward: all that runs between is nearer than the reuse distance.

    ``__params_to_release`` walks the modules that run next, forward and backward, until it has passed so many elements.
    """
    return 2 * sum(numel for numel, _ in zero.numels) < zero.reuse


def classes(job: Inputs, zero: Zero) -> tuple[RankClass, ...]:
    """All ranks are alike."""
    found = (*_parameters(job, zero), *_training(job, zero))
    return (RankClass(first=0, last=0, ranks=job.world_size, terms=tuple(one for one in found if one.bytes)),)


def _parameters(job: Inputs, zero: Zero) -> tuple[Term, ...]:
    size = part(zero, trained=False) * zero.size
    parts = locked(job, "parameters", size, "parts") if zero.offload_params else term("parameters", size, "parts")
    cut = [numel for numel, _ in zero.numels if numel > zero.persistent]
    gathered = min(sum(cut), max(zero.live, zero.reuse) + zero.module) + zero.ranks * len(cut)  # and what fills them
    what = "gathered parameters, at most as many as may be live"
    return (
        parts,
        term("parameters", small(zero) * zero.size, "small ones, whole on every rank"),
        term("gathered units", gathered * zero.size, what, label=Label.BOUNDED, moment=Moment.PASS),
    )


def _training(job: Inputs, zero: Zero) -> tuple[Term, ...]:
    if not job.trains or job.optimizer is None:
        return ()
    mine = part(zero, trained=True)
    place = host(job, away=zero.offload_state)
    trained = sum(numel for numel, trains in zero.numels if trains)
    sent = max(min(zero.bucket, trained), zero.largest) + zero.ranks * len(zero.numels)  # each is padded to the ranks
    found = [
        term("master weights", mine * MASTER, "float32 copy of the part", place),
        *state(job, zero, stepped_at_once(zero)),
        term("buckets", zero.bucket * zero.sent_size, "reduce bucket, from the start"),
        working(sent * zero.sent_size, "gradients as they are sent"),
        working(zero.largest * zero.size, "gradient of one parameter, as it comes"),
    ]
    what = "of the part, from the start"
    if not zero.offload_state:
        cast = MASTER if zero.grad_size != MASTER else 0
        copied = working(
            mine * (zero.grad_size + cast), "gradients of the part, end to end, while it is stepped", moment=Moment.STEP
        )
        return (*found, term("gradients", mine * zero.grad_size, what), copied)
    pins = zero.pins_state
    return (
        *found,
        locked(job, "gradients", mine * zero.grad_size, what, pins=pins),
        locked(job, "gradients", mine * MASTER, "float32, of the part, from the start", pins=pins),
    )
