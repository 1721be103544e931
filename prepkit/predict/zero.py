"""DeepSpeed's ZeRO 1 to 3: which formulas hold for a job, and what DeepSpeed's defaults cost, in words."""

from __future__ import annotations

from prepkit.findings.text import in_bytes
from prepkit.predict import notes, replicated, zero3, zero12
from prepkit.predict.inputs import Inputs
from prepkit.predict.prediction import Prediction
from prepkit.predict.zero_inputs import Zero
from prepkit.predict.zero_traffic import traffic


def predict_zero(job: Inputs) -> Prediction:
    """Bytes of the ``DeepSpeed`` engine at stages 1 to 3."""
    zero = job.zero
    if zero is None or zero.unknown:
        reason = ", ".join(zero.unknown) if zero else "no call of deepspeed.initialize"
        missing = (f"everything: no formulas here know {reason}",)
        return Prediction(engine=job.engine, world_size=job.world_size, not_predicted=missing)
    found = zero3.classes(job, zero) if zero.stage == 3 else zero12.classes(job, zero)
    buffers = replicated.module_buffers(job)
    return Prediction(
        engine=job.engine,
        world_size=job.world_size,
        shards=zero.ranks if len(found) > 1 else 1,
        classes=tuple(one.and_also(buffers) for one in found),
        traffic=traffic(job, zero),
        notes=(*notes.of_whole(job), *_notes(job, zero)),
        not_predicted=replicated.not_predicted(job),
    )


def _notes(job: Inputs, zero: Zero) -> tuple[str, ...]:
    """What DeepSpeed's defaults cost, in words."""
    if not job.trains:
        return ()
    everything = sum(numel for numel, _ in zero.numels)
    whole_ = in_bytes(everything * zero.size)
    if zero.stage < 3:
        return (_sent(job, zero, whole_), *_kept(zero))
    kept = in_bytes(zero.bucket * zero.sent_size)
    found: tuple[str, ...] = (
        f"The reduce bucket takes {kept} on every rank from the start (reduce_bucket_size={zero.bucket}).",
    )
    if zero3.gathered_once(zero):
        why = f"twice the model is less than stage3_max_reuse_distance={zero.reuse}; a smaller number frees them"
        return (*found, f"All {whole_} of parameters stay gathered from forward to backward: {why}.")
    order = "What is gathered once, not twice, follows the order in which modules run, which a plan does not know"
    return (*found, f"{order} (stage3_max_reuse_distance={zero.reuse}): all-gathers are counted twice.")


def _sent(job: Inputs, zero: Zero, whole_: str) -> str:
    said = f"ZeRO {zero.stage} all-reduces gradients and then gathers all parameters"
    if zero.stage == 2 and job.accumulation > 1:
        return f"{said}; gradients after each of the {job.accumulation} micro-batches. The model is {whole_}."
    return f"{said}: it sends as much as 3 x the model a step, not 2 x; the model is {whole_}."


def _kept(zero: Zero) -> tuple[str, ...]:
    if zero.high:
        more = in_bytes(zero12.flat(zero) * 4)
        return (f"ZeRO 1 in bfloat16 keeps float32 gradients of all parameters on every rank: {more}; ZeRO 2 a part.",)
    inside = max(run.inside for run in zero12.overlaps(zero)) * zero.size if zero.groups else 0
    if zero.compact or inside < 2 * sum(zero12.parts(zero)) * zero.size:
        return ()
    said = "A rank keeps whole gradients of the parameters that lie in its part, if only partly"
    return (f"{said}: up to {in_bytes(inside)}; in bfloat16 with float32 gradients it keeps its part alone.",)
