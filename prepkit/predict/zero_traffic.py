"""What ranks send and copy under ZeRO in one optimizer step, from the second one on."""

from __future__ import annotations

from prepkit.plan.flat_layout import round_up
from prepkit.predict.inputs import Inputs
from prepkit.predict.prediction import Collective, Label, Traffic
from prepkit.predict.zero3 import gathered_once, part
from prepkit.predict.zero12 import flat, parts
from prepkit.predict.zero_inputs import Zero
from prepkit.predict.zero_terms import MASTER


def traffic(inputs: Inputs, zero: Zero) -> tuple[Traffic, ...]:
    """Collectives, and copies between device and host; entries of 0 bytes are left out."""
    sends = () if zero.ranks == 1 else _zero3(inputs, zero) if zero.stage == 3 else _zero12(inputs, zero)
    copies = (
        ()
        if inputs.device == "cpu"
        else _zero3_copies(inputs, zero)
        if zero.stage == 3
        else _zero12_copies(inputs, zero)
    )
    return tuple(entry for entry in (*sends, *copies) if entry.bytes)


def _send(zero: Zero, collective: Collective, what: str, calls: int, size: int, label: Label = Label.EXACT) -> Traffic:
    return Traffic(
        collective=collective, what=what, calls=calls, bytes=size, ranks=zero.ranks, axis="shard", label=label
    )


def _copy(what: str, calls: int, size: int) -> Traffic:
    return Traffic(
        collective="host copy", what=what, calls=calls, bytes=size, ranks=1, axis="shard", label=Label.BOUNDED
    )


def _zero12(inputs: Inputs, zero: Zero) -> tuple[Traffic, ...]:
    """Gradients are all-reduced as shipped (deepspeed #7059): at stage 2 after every micro-batch, at stage 1 once."""
    if not inputs.trains or inputs.optimizer is None:
        return ()
    times = inputs.accumulation if zero.stage == 2 else 1
    if zero.bf16_optimizer:
        return (
            _send(zero, "all-reduce", "gradients", len(zero.groups), flat(zero) * zero.sent_size),
            _send(zero, "all-gather", "parameters", len(zero.groups), flat(zero) * zero.size),
        )
    calls = buckets([numel for numels in zero.groups for numel in numels], zero.bucket)
    return (
        _send(zero, "all-reduce", "gradients", calls * times, zero.stepped * zero.sent_size * times),
        _send(zero, "all-gather", "parameters", len(zero.groups), flat(zero) * zero.size),
    )


def buckets(numels: list[int], limit: int) -> int:
    """How often a bucket of at most ``limit`` elements is sent, if the gradient of the last parameter comes first."""
    calls, filled = 0, 0
    for numel in reversed(numels):
        if filled and filled + numel > limit:
            calls, filled = calls + 1, 0
        filled += numel
    return calls + bool(filled)


def _zero3(inputs: Inputs, zero: Zero) -> tuple[Traffic, ...]:
    """Small parameters are gathered once, after the step; the others for every forward, and again for its backward.

    Which of them stay gathered between the two follows the order in which modules run, unless all of them do.
    """
    times, once = inputs.accumulation, gathered_once(zero) or not inputs.trains
    padded = [(numel, round_up(numel, zero.ranks)) for numel, _ in zero.numels]
    kept = sum(size for numel, size in padded if numel <= zero.persistent) if inputs.trains else 0
    sharded = sum(size for numel, size in padded if numel > zero.persistent)
    label = Label.EXACT if once and inputs.trains and inputs.optimizer else Label.BOUNDED
    uses = times * (1 if once else 2)
    many = sum(numel > zero.persistent for numel, _ in padded)
    gathers = _send(
        zero, "all-gather", "parameters", many * uses + bool(kept), (sharded * uses + kept) * zero.size, label
    )
    if not inputs.trains or inputs.optimizer is None:
        return (gathers,)
    reduced = part(zero, trained=True) * zero.ranks * zero.sent_size * times
    calls = buckets([numel for numel, trains in zero.numels if trains], zero.bucket) * times
    return (gathers, _send(zero, "reduce-scatter", "gradients", calls, reduced))


# --- between device and host ---------------------------------------------------------------------------------------


def _zero12_copies(inputs: Inputs, zero: Zero) -> tuple[Traffic, ...]:
    if not zero.offload_state or not inputs.trains or inputs.optimizer is None:
        return ()
    mine, many = sum(parts(zero)), sum(map(len, zero.groups))
    copies = (
        _copy("gradients to the host", many, mine * MASTER),
        _copy("parameters to the device", len(zero.groups), mine * zero.size),
    )
    if zero.compact or inputs.accumulation == 1 or zero.stage == 1:
        return copies
    touched = min(zero.stepped, mine + 2 * zero.largest * len(zero.groups)) * zero.size
    more = 2 * inputs.accumulation - 1
    return (*copies, _copy("whole gradients between micro-batches", many * more, touched * more))


def _zero3_copies(inputs: Inputs, zero: Zero) -> tuple[Traffic, ...]:
    """A shard on the host goes to the device for every gather; gradients and stepped parts go back and forth."""
    copies: list[Traffic] = []
    trains = inputs.trains and inputs.optimizer is not None
    if zero.offload_params:
        uses = inputs.accumulation * (1 if gathered_once(zero) or not trains else 2) + trains
        copies.append(
            _copy("parts to the device", uses * len(zero.numels), part(zero, trained=False) * zero.size * uses)
        )
    if not trains:
        return tuple(copies)
    mine, many = part(zero, trained=True), sum(trained for _, trained in zero.numels)
    if zero.offload_state:
        swaps = mine * zero.grad_size * inputs.accumulation
        copies.append(_copy("gradients to the host", many * (inputs.accumulation + 1), swaps + mine * MASTER))
        copies.append(_copy("gradients to the device", many * inputs.accumulation, swaps))
    if zero.offload_state != zero.offload_params:
        copies.append(_copy("stepped parts", 1, mine * zero.size))
    return tuple(copies)
