"""What engines share in which every rank holds the whole model: no shards, one class of ranks."""

from __future__ import annotations

from prepkit.predict.inputs import Inputs
from prepkit.predict.optimizers import State, rule_of, steps_on_device
from prepkit.predict.prediction import Label, Moment, Place, RankClass, Term


def terms(job: Inputs) -> tuple[Term, ...]:
    """Parameters, buffers, optimizer state, and the copies that autocast makes; gradients are the engine's business."""
    return (
        Term(
            category="parameters",
            bytes=job.total(),
            what="parts and whole ones" if job.axis("tensor") > 1 else "whole on every rank",
        ),
        *module_buffers(job),
        *optimizer_state(job, whole_state(job)),
        *_autocast(job),
    )


def module_buffers(job: Inputs) -> tuple[Term, ...]:
    """Registered buffers, which no engine shards."""
    return (Term(category="module buffers", bytes=job.buffers, what="whole on every rank"),) if job.buffers else ()


def whole_state(job: Inputs) -> State | None:
    """Optimizer state of unsharded parameters; None where it is not predicted."""
    rule = rule_of(job.optimizer) if job.optimizer and job.trains else None
    if rule is None or job.optimizer is None:
        return None
    options = [dict(group) for group in job.optimizer.groups]
    state = State(0)
    for index, times in job.counted.items():
        for one, count in job.contents[index].held:
            if one.group is not None:
                state += rule(one.shape, one.shape, one.size, options[one.group]) * (count * times)
    return state


def optimizer_state(job: Inputs, state: State | None) -> tuple[Term, ...]:
    """The state as terms: beside the parameters; its counters are on the host unless the optimizer is fused."""
    if state is None or job.optimizer is None or not state.bytes + state.step:
        return ()
    kept = Term(
        category="optimizer state",
        bytes=state.bytes,
        what=f"of {job.optimizer.name}",
        label=state.label,
        place=at_rest(job),
    )
    host = job.device != "cpu" and (job.offload or not steps_on_device(job.optimizer))
    steps = Term(
        category="optimizer state",
        bytes=state.step,
        what="step counters",
        label=state.label,
        place="host" if host else "device",
    )
    return tuple(term for term in (kept, steps) if term.bytes)


def at_rest(job: Inputs) -> Place:
    """Where shards live between uses."""
    return "host" if job.offload and job.device != "cpu" else "device"


def _autocast(job: Inputs) -> tuple[Term, ...]:
    """Autocast keeps the cast copy of a trained float32 weight until the forward ends (torch ``autocast_mode.cpp``)."""
    size = job.autocast_size
    if size is None:
        return ()
    held = [(one, n * job.counted[i]) for i, c in enumerate(job.contents) for one, n in c.held]
    elements = sum(one.numel * times for one, times in held if one.trains and one.floating and one.size == 4)
    what = "autocast's copies of the weights that a matrix product uses"
    return (
        Term(category="working buffers", bytes=elements * size, what=what, label=Label.BOUNDED, moment=Moment.PASS),
    )


def alone(job: Inputs, found: tuple[Term, ...]) -> tuple[RankClass, ...]:
    """One class for all ranks."""
    return (RankClass(first=0, last=0, ranks=job.world_size, terms=found),)


def not_predicted(job: Inputs) -> tuple[str, ...]:
    """The state of an optimizer that no table knows, and what steps make that none knows."""
    if job.optimizer is None or not job.trains or rule_of(job.optimizer) is not None:
        return job.unknown
    return (f"optimizer state: {job.optimizer.module}.{job.optimizer.name} is not in the tables", *job.unknown)
