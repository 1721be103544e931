"""Prediction for ZeRO 1 to 3: bytes, traffic of one optimizer step from the second one on, and costs of defaults."""

from __future__ import annotations

from prepkit.findings.text import in_bytes
from prepkit.plan.layout import round_up
from prepkit.predict import notes, replicated
from prepkit.predict.deepspeed.bytes import (
    MASTER,
    classes_zero3,
    classes_zero12,
    flat,
    gathered_once,
    overlaps,
    part,
    parts,
)
from prepkit.predict.inputs import Inputs
from prepkit.predict.prediction import Collective, Label, Prediction, Traffic
from prepkit.predict.zero import Zero


def predict_zero(inputs: Inputs) -> Prediction:
    """Bytes of the ``DeepSpeed`` engine at stages 1 to 3; other calls are said to be not predicted, with the reason."""
    zero = inputs.zero
    if zero is None or zero.unknown:
        reason = ", ".join(zero.unknown) if zero else "no call of deepspeed.initialize"
        missing = (f"everything: no formulas here know {reason}",)
        return Prediction(engine=inputs.engine, world_size=inputs.world_size, not_predicted=missing)
    classes = (classes_zero3 if zero.stage == 3 else classes_zero12)(inputs, zero)
    buffers = replicated.module_buffers(inputs)
    return Prediction(
        engine=inputs.engine,
        world_size=inputs.world_size,
        shards=zero.ranks if len(classes) > 1 else 1,
        classes=tuple(ranks.and_also(buffers) for ranks in classes),
        traffic=traffic(inputs, zero),
        notes=(*notes.of_replicated(inputs), *_notes(inputs, zero)),
        not_predicted=replicated.not_predicted(inputs),
    )


def _notes(inputs: Inputs, zero: Zero) -> tuple[str, ...]:
    """Return what DeepSpeed's defaults cost, in words."""
    if not inputs.trains:
        return ()
    model = in_bytes(sum(numel for numel, _ in zero.numels) * zero.size)
    if zero.stage < 3:
        return (_sent(inputs, zero, model), *_kept(zero))
    kept = in_bytes(zero.bucket * zero.sent_size)
    sentences: tuple[str, ...] = (
        f"The reduce bucket takes {kept} on every rank from the start (reduce_bucket_size={zero.bucket}).",
    )
    if gathered_once(zero):
        why = f"twice the model is less than stage3_max_reuse_distance={zero.reuse}; a smaller number frees them"
        return (*sentences, f"All {model} of parameters stay gathered from forward to backward: {why}.")
    order = "What is gathered once, not twice, follows the order in which modules run, which a plan does not know"
    return (*sentences, f"{order} (stage3_max_reuse_distance={zero.reuse}): all-gathers are counted twice.")


def _sent(inputs: Inputs, zero: Zero, model: str) -> str:
    sends = f"ZeRO {zero.stage} all-reduces gradients and then gathers all parameters"
    if zero.stage == 2 and inputs.accumulation > 1:
        return f"{sends}; gradients after each of the {inputs.accumulation} micro-batches. The model is {model}."
    return f"{sends}: it sends as much as 3 x the model a step, not 2 x; the model is {model}."


def _kept(zero: Zero) -> tuple[str, ...]:
    if zero.bf16_optimizer:
        more = in_bytes(flat(zero) * 4)
        return (f"ZeRO 1 in bfloat16 keeps float32 gradients of all parameters on every rank: {more}; ZeRO 2 a part.",)
    inside = max(run.touched for run in overlaps(zero)) * zero.size if zero.groups else 0
    if zero.compact or inside < 2 * sum(parts(zero)) * zero.size:
        return ()
    keeps = "A rank keeps whole gradients of the parameters that lie in its part, if only partly"
    return (f"{keeps}: up to {in_bytes(inside)}; in bfloat16 with float32 gradients it keeps its part alone.",)


# --- traffic ---------------------------------------------------------------------------------------------------------


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
