"""ZeRO 3: every parameter is padded by itself and cut; it is gathered around the modules that use it.

Read in ``stage3.py``, ``partition_parameters.py`` and ``partitioned_param_coordinator.py`` of DeepSpeed 0.19.8's
``runtime/zero``.
"""

from __future__ import annotations

from prepkit.plan.flat_layout import round_up
from prepkit.plan.layout import chunk_rows
from prepkit.predict import replicated
from prepkit.predict.inputs import Inputs
from prepkit.predict.prediction import Label, Lifetime, RankClass, Term
from prepkit.predict.zero_inputs import Zero
from prepkit.predict.zero_terms import MASTER, host, locked, state, term, working


def part(zero: Zero, *, trained: bool) -> int:
    """Elements that each rank holds, padding included: of all parameters, or of the trained ones."""
    return sum(chunk_rows(numel, zero.ranks) for numel, trains in zero.numels if trains or not trained)


def stepped_at_once(zero: Zero) -> tuple[int, ...]:
    """Elements of the float32 tensors that a rank steps one after the other (``_create_fp16_sub_groups``)."""
    sub_groups: list[int] = []
    for numels in zero.groups:
        shards = [chunk_rows(numel, zero.ranks) for numel in numels]
        filled = 0
        for shard in shards:
            filled += shard
            if filled >= zero.sub_group and sum(shards) > zero.sub_group:
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


def classes(inputs: Inputs, zero: Zero) -> tuple[RankClass, ...]:
    """All ranks hold equally many bytes: every parameter is padded to a multiple of the ranks."""
    terms = tuple(entry for entry in (*_parameters(inputs, zero), *_training(inputs, zero)) if entry.bytes)
    return replicated.one_class(inputs, terms)


def _parameters(inputs: Inputs, zero: Zero) -> tuple[Term, ...]:
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


def _training(inputs: Inputs, zero: Zero) -> tuple[Term, ...]:
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
