"""What ranks send and copy under ZeRO in one optimizer step, from the second one on."""

from __future__ import annotations

from prepkit.predict.inputs import Inputs
from prepkit.predict.prediction import Collective, Label, Traffic
from prepkit.predict.zero3 import gathered_once, part
from prepkit.predict.zero12 import flat, parts
from prepkit.predict.zero_inputs import Zero
from prepkit.predict.zero_terms import MASTER


def traffic(job: Inputs, zero: Zero) -> tuple[Traffic, ...]:
    """Everything of some bytes: collectives, and copies between device and host."""
    sends = () if zero.ranks == 1 else _three(job, zero) if zero.stage == 3 else _low(job, zero)
    copies = () if job.device == "cpu" else _three_copies(job, zero) if zero.stage == 3 else _low_copies(job, zero)
    return tuple(one for one in (*sends, *copies) if one.bytes)


def _send(zero: Zero, collective: Collective, what: str, calls: int, size: int, label: Label = Label.EXACT) -> Traffic:
    return Traffic(
        collective=collective, what=what, calls=calls, bytes=size, ranks=zero.ranks, axis="shard", label=label
    )


def _copy(what: str, calls: int, size: int) -> Traffic:
    return Traffic(
        collective="host copy", what=what, calls=calls, bytes=size, ranks=1, axis="shard", label=Label.BOUNDED
    )


def _low(job: Inputs, zero: Zero) -> tuple[Traffic, ...]:
    """Gradients are all-reduced as shipped (deepspeed #7059): at stage 2 after every micro-batch, at stage 1 once."""
    if not job.trains or job.optimizer is None:
        return ()
    times = job.accumulation if zero.stage == 2 else 1
    if zero.high:
        return (
            _send(zero, "all-reduce", "gradients", len(zero.groups), flat(zero) * zero.sent_size),
            _send(zero, "all-gather", "parameters", len(zero.groups), flat(zero) * zero.size),
        )
    calls = buckets([numel for some in zero.groups for numel in some], zero.bucket)
    return (
        _send(zero, "all-reduce", "gradients", calls * times, zero.stepped * zero.sent_size * times),
        _send(zero, "all-gather", "parameters", len(zero.groups), flat(zero) * zero.size),
    )


def buckets(numels: list[int], limit: int) -> int:
    """How often a bucket of so many elements is sent, if gradients come last parameter first."""
    calls, held = 0, 0
    for numel in reversed(numels):
        if held and held + numel > limit:
            calls, held = calls + 1, 0
        held += numel
    return calls + bool(held)


def _three(job: Inputs, zero: Zero) -> tuple[Traffic, ...]:
    """Small parameters are gathered once, after the step; the others for every forward, and again for its backward.

    Which of them stay gathered between the two follows the order in which modules run, unless all of them do.
    """
    times, once = job.accumulation, gathered_once(zero) or not job.trains
    wide = [(numel, -(-numel // zero.ranks) * zero.ranks) for numel, _ in zero.numels]
    kept = sum(pad for numel, pad in wide if numel <= zero.persistent) if job.trains else 0
    cut = sum(pad for numel, pad in wide if numel > zero.persistent)
    label = Label.EXACT if once and job.trains and job.optimizer else Label.BOUNDED
    uses = times * (1 if once else 2)
    many = sum(numel > zero.persistent for numel, _ in wide)
    found = _send(zero, "all-gather", "parameters", many * uses + bool(kept), (cut * uses + kept) * zero.size, label)
    if not job.trains or job.optimizer is None:
        return (found,)
    reduced = part(zero, trained=True) * zero.ranks * zero.sent_size * times
    calls = buckets([numel for numel, trains in zero.numels if trains], zero.bucket) * times
    return (found, _send(zero, "reduce-scatter", "gradients", calls, reduced))


# --- between device and host ---------------------------------------------------------------------------------------


def _low_copies(job: Inputs, zero: Zero) -> tuple[Traffic, ...]:
    if not zero.offload_state or not job.trains or job.optimizer is None:
        return ()
    mine, many = sum(parts(zero)), sum(map(len, zero.groups))
    found = (
        _copy("gradients to the host", many, mine * MASTER),
        _copy("parameters to the device", len(zero.groups), mine * zero.size),
    )
    if zero.compact or job.accumulation == 1 or zero.stage == 1:
        return found
    inside = min(zero.stepped, mine + 2 * zero.largest * len(zero.groups)) * zero.size
    more = 2 * job.accumulation - 1
    return (*found, _copy("whole gradients between micro-batches", many * more, inside * more))


def _three_copies(job: Inputs, zero: Zero) -> tuple[Traffic, ...]:
    """A part that is on the host goes to the device for every gather; gradients and stepped parts go back and forth."""
    found: list[Traffic] = []
    trains = job.trains and job.optimizer is not None
    if zero.offload_params:
        uses = job.accumulation * (1 if gathered_once(zero) or not trains else 2) + trains
        found.append(
            _copy("parts to the device", uses * len(zero.numels), part(zero, trained=False) * zero.size * uses)
        )
    if not trains:
        return tuple(found)
    mine, many = part(zero, trained=True), sum(trained for _, trained in zero.numels)
    if zero.offload_state:
        swaps = mine * zero.grad_size * job.accumulation
        found.append(_copy("gradients to the host", many * (job.accumulation + 1), swaps + mine * MASTER))
        found.append(_copy("gradients to the device", many * job.accumulation, swaps))
    if zero.offload_state != zero.offload_params:
        found.append(_copy("stepped parts", 1, mine * zero.size))
    return tuple(found)
