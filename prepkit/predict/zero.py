"""DeepSpeed's ZeRO 1 to 3: which formulas hold, and what DeepSpeed's defaults cost, in words."""

from __future__ import annotations

from prepkit.findings.text import in_bytes
from prepkit.predict import notes, replicated, zero3, zero12
from prepkit.predict.inputs import Inputs
from prepkit.predict.prediction import Prediction
from prepkit.predict.zero_inputs import Zero
from prepkit.predict.zero_traffic import traffic


def predict_zero(inputs: Inputs) -> Prediction:
    """Bytes of the ``DeepSpeed`` engine at stages 1 to 3; other calls are said to be not predicted, with the reason."""
    zero = inputs.zero
    if zero is None or zero.unknown:
        reason = ", ".join(zero.unknown) if zero else "no call of deepspeed.initialize"
        missing = (f"everything: no formulas here know {reason}",)
        return Prediction(engine=inputs.engine, world_size=inputs.world_size, not_predicted=missing)
    classes = zero3.classes(inputs, zero) if zero.stage == 3 else zero12.classes(inputs, zero)
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
    """What DeepSpeed's defaults cost, in words."""
    if not inputs.trains:
        return ()
    model = in_bytes(sum(numel for numel, _ in zero.numels) * zero.size)
    if zero.stage < 3:
        return (_sent(inputs, zero, model), *_kept(zero))
    kept = in_bytes(zero.bucket * zero.sent_size)
    sentences: tuple[str, ...] = (
        f"The reduce bucket takes {kept} on every rank from the start (reduce_bucket_size={zero.bucket}).",
    )
    if zero3.gathered_once(zero):
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
        more = in_bytes(zero12.flat(zero) * 4)
        return (f"ZeRO 1 in bfloat16 keeps float32 gradients of all parameters on every rank: {more}; ZeRO 2 a part.",)
    inside = max(run.touched for run in zero12.overlaps(zero)) * zero.size if zero.groups else 0
    if zero.compact or inside < 2 * sum(zero12.parts(zero)) * zero.size:
        return ()
    keeps = "A rank keeps whole gradients of the parameters that lie in its part, if only partly"
    return (f"{keeps}: up to {in_bytes(inside)}; in bfloat16 with float32 gradients it keeps its part alone.",)
