"""DeepSpeed ZeRO 1, 2 and 3, read from the one call of the plan.

Followed in DeepSpeed 0.19 ``runtime/zero/stage_1_and_2.py``, ``stage3.py``, ``partition_parameters.py`` and
``runtime/bf16_optimizer.py``. Below stage 3 the parameters of an optimizer group lie end to end, padded to twice the
ranks, and every rank keeps all of them; at stage 3 every parameter is padded by itself, and cut.
"""

from __future__ import annotations

from prepkit.predict import notes, whole
from prepkit.predict.job import Job
from prepkit.predict.optimizers import State, rule_of
from prepkit.predict.prediction import Category, Label, Moment, Place, Prediction, Term, Traffic
from prepkit.predict.zero_job import Zero
from prepkit.render_names import in_bytes

MASTER = 4
"""Bytes of one element of the float32 copy that is stepped; there is one also of a float32 model."""


def predict_zero(job: Job) -> Prediction:
    """Bytes of the ``DeepSpeed`` engine at stages 1 to 3, all ranks alike."""
    zero = job.zero
    if zero is None or zero.unknown:
        reason = ", ".join(zero.unknown) if zero else "no call of deepspeed.initialize"
        missing = (f"everything: no formulas here know {reason}",)
        return Prediction(engine=job.engine, world_size=job.world_size, not_predicted=missing)
    found = (*(_stage3(job, zero) if zero.stage == 3 else _stage12(job, zero)), *whole.module_buffers(job))
    said = (*notes.of_whole(job), *_notes(job, zero))
    return Prediction(
        engine=job.engine,
        world_size=job.world_size,
        shards=1,
        classes=whole.alone(job, tuple(term for term in found if term.bytes)),
        traffic=_traffic(job, zero) if zero.ranks > 1 else (),
        notes=said,
        not_predicted=whole.not_predicted(job),
    )


def flat(zero: Zero) -> int:
    """Elements that are stepped below stage 3, padding included."""
    return sum(-(-numel // (2 * zero.ranks)) * 2 * zero.ranks for numel in zero.groups)


def part(zero: Zero, *, trained: bool) -> int:
    """Elements on every rank at stage 3, padding included: of all parameters, or of the trained ones."""
    return sum(-(-numel // zero.ranks) for numel, trains in zero.numels if trains or not trained)


def small(zero: Zero) -> int:
    """Elements of the parameters that stage 3 never cuts away."""
    return sum(numel for numel, _ in zero.numels if numel <= zero.persistent)


def _term(category: Category, size: int, what: str, place: Place = "device", label: Label = Label.EXACT) -> Term:
    moment = Moment.STEP if category == "gradients" else Moment.ALWAYS
    return Term(category=category, bytes=size, what=what, place=place, label=label, moment=moment)


def _stage12(job: Job, zero: Zero) -> tuple[Term, ...]:
    flat_ = flat(zero)
    still = sum(numel for numel, trains in zero.numels if not trains)
    place: Place = "host" if zero.offload_state and job.device != "cpu" else "device"
    mine = flat_ // zero.ranks
    found = [_term("parameters", (flat_ + still) * zero.size, "whole on every rank, end to end")]
    if not job.trains or job.optimizer is None:
        return tuple(found)
    found += [
        _term("master weights", mine * MASTER, "float32 copy of a part", place),
        *_state(job, zero, mine),
    ]
    if zero.stage == 2:
        label = Label.BOUNDED if zero.offload_state else Label.EXACT
        found.append(_term("gradients", mine * zero.grad_size, "of a part", place, label))
    else:
        what = "of all parameters, kept until the step"
        found.append(_term("gradients", flat_ * (zero.size + zero.grad_size), what, label=Label.BOUNDED))
    turns = 2 if zero.overlaps else 1
    found.append(_working(zero.bucket * turns * max(zero.size, zero.sent_size), "reduce bucket, made in backward"))
    found.append(_working(mine * MASTER, "float32 gradients of a part, while it is stepped"))
    return tuple(found)


def _stage3(job: Job, zero: Zero) -> tuple[Term, ...]:
    place: Place = "host" if zero.offload_state and job.device != "cpu" else "device"
    kept: Place = "host" if zero.offload_params and job.device != "cpu" else "device"
    found = [
        _term("parameters", part(zero, trained=False) * zero.size, "parts", kept),
        _term("parameters", small(zero) * zero.size, "small ones, whole on every rank"),
    ]
    gathered = sum(numel for numel, _ in zero.numels)
    if gathered >= zero.reuse:
        gathered = max(zero.reuse, *(numel for numel, _ in zero.numels))
    what = "gathered parameters, at most as many as may be live"
    live = Term(
        category="gathered units", bytes=gathered * zero.size, what=what, label=Label.BOUNDED, moment=Moment.PASS
    )
    found.append(live)
    if not job.trains or job.optimizer is None:
        return tuple(found)
    mine = part(zero, trained=True)
    label = Label.BOUNDED if zero.offload_state else Label.EXACT
    found += [
        _term("master weights", mine * MASTER, "float32 copy of the part", place, label),
        *_state(job, zero, mine),
    ]
    found.append(_term("gradients", mine * zero.grad_size, "of the part, allocated from the start", place, label))
    found.append(_term("buckets", zero.bucket * zero.sent_size, "reduce bucket, from the start"))
    found.append(_working(mine * MASTER, "float32 gradients of the part, while it is stepped"))
    return tuple(found)


def _working(size: int, what: str) -> Term:
    return Term(category="working buffers", bytes=size, what=what, label=Label.BOUNDED, moment=Moment.PASS)


def _state(job: Job, zero: Zero, elements: int) -> tuple[Term, ...]:
    """Of the float32 copy, which is one tensor a group."""
    rule = rule_of(job.optimizer) if job.optimizer else None
    if rule is None or job.optimizer is None:
        return ()
    options = dict(job.optimizer.groups[0]) if job.optimizer.groups else {}
    state: State = rule((elements,), (elements,), MASTER, options)
    place: Place = "host" if zero.offload_state and job.device != "cpu" else "device"
    many = max(len(zero.groups), 1)
    label = Label.BOUNDED if zero.offload_state and state.label is Label.EXACT else state.label
    kept = _term("optimizer state", state.bytes, f"of {job.optimizer.name}, float32", place, label)
    steps = _term("optimizer state", state.step * many, "step counters", place, Label.BOUNDED)
    return (kept, steps)


# --- traffic -------------------------------------------------------------------------------------------------------


def _send(zero: Zero, collective: str, what: str, calls: int, size: int, label: Label) -> Traffic:
    assert collective in ("all-reduce", "all-gather", "reduce-scatter")
    return Traffic(
        collective=collective,  # type: ignore[arg-type]  # one of the three
        what=what, calls=calls, bytes=size, ranks=zero.ranks, axis="shard", label=label,
    )  # fmt: skip


def _traffic(job: Job, zero: Zero) -> tuple[Traffic, ...]:
    """What is sent from the second step on (deepspeed #7059: below stage 3 gradients are all-reduced as shipped)."""
    times = job.accumulation
    if zero.stage == 3:
        return _traffic3(job, zero)
    if not job.trains:
        return ()
    all_of_it = zero.stage == 1 and zero.bfloat16 and zero.grad_size == MASTER
    reduced = (flat(zero) if all_of_it else sum(zero.groups)) * zero.sent_size * (times if zero.stage == 2 else 1)
    label = Label.EXACT if times == 1 else Label.BOUNDED
    return (
        _send(zero, "all-reduce", "gradients", len(zero.groups), reduced, label),
        _send(zero, "all-gather", "parameters", len(zero.groups), flat(zero) * zero.size, label),
    )


def _traffic3(job: Job, zero: Zero) -> tuple[Traffic, ...]:
    """A model of fewer elements than may be live is gathered once; else in backward again, but for what is reused."""
    times = job.accumulation
    padded = [(numel, -(-numel // zero.ranks) * zero.ranks) for numel, _ in zero.numels]
    everything = sum(pad for _, pad in padded)
    once = sum(numel for numel, _ in padded) < zero.reuse or not job.trains
    again = 0 if once else sum(pad for numel, pad in padded if numel > zero.persistent)
    label = Label.EXACT if once and times == 1 and job.trains else Label.BOUNDED
    size = (everything + again) * zero.size * times
    found = _send(zero, "all-gather", "parameters", len(padded) * times, size, label)
    reduced = part(zero, trained=True) * zero.ranks * zero.sent_size * times
    back = _send(zero, "reduce-scatter", "gradients", times, reduced, label)
    return (found, back) if job.trains else (found,)


def _notes(job: Job, zero: Zero) -> tuple[str, ...]:
    """What DeepSpeed's defaults cost, in words."""
    if not job.trains:
        return ()
    everything = sum(numel for numel, _ in zero.numels)
    whole_ = in_bytes(everything * zero.size)
    if zero.stage < 3:
        said = "all-reduces gradients and then gathers all parameters"
        return (f"ZeRO {zero.stage} {said}: it sends as much as 3 x the model a step, not 2 x; the model is {whole_}.",)
    kept = in_bytes(zero.bucket * zero.sent_size)
    found: tuple[str, ...] = (
        f"The reduce bucket takes {kept} on every rank from the start (reduce_bucket_size={zero.bucket}).",
    )
    if everything < zero.reuse:
        why = f"the model is smaller than stage3_max_reuse_distance={zero.reuse}; a smaller number frees them"
        found += (f"All {whole_} of parameters stay gathered from forward to backward: {why}.",)
    return found
