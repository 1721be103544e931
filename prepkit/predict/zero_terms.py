"""What the terms of every ZeRO stage share: places, optimizer state, the step's copies."""

from __future__ import annotations

from prepkit.predict.inputs import Inputs
from prepkit.predict.optimizers import State, rule_of, steps_on_device
from prepkit.predict.prediction import Category, Label, Moment, Place, Term
from prepkit.predict.zero_inputs import Zero

MASTER = 4
"""Bytes of one element of the float32 copy that is stepped; there is one also of a float32 model."""


def term(
    category: Category,
    size: int,
    what: str,
    place: Place = "device",
    label: Label = Label.EXACT,
    moment: Moment = Moment.ALWAYS,
) -> Term:
    """One term."""
    return Term(category=category, bytes=size, what=what, place=place, label=label, moment=moment)


def working(size: int, what: str, label: Label = Label.BOUNDED, moment: Moment = Moment.PASS) -> Term:
    """Bytes that come and go."""
    return term("working buffers", size, what, label=label, moment=moment)


def host(job: Inputs, *, away: bool) -> Place:
    """Where offloaded tensors are; on a CPU there is one memory."""
    return "host" if away and job.device != "cpu" else "device"


def locked(job: Inputs, category: Category, size: int, what: str, *, pins: bool = True) -> Term:
    """Bytes in host memory that are page-locked for an accelerator: torch rounds such a block up to a power of two.

    ``CachingHostAllocatorImpl::allocate``; on a CPU DeepSpeed locks nothing, and the number is exact.
    """
    rounds = pins and job.device != "cpu" and size > 0
    label = Label.BOUNDED if rounds else Label.EXACT
    found = 1 << (size - 1).bit_length() if rounds else size
    return term(category, found, what, host(job, away=True), label)


def state(job: Inputs, zero: Zero, parts: tuple[int, ...]) -> tuple[Term, ...]:
    """State of the float32 copies, one tensor for each of ``parts``, and their step counters."""
    rule = rule_of(job.optimizer) if job.optimizer else None
    if rule is None or job.optimizer is None:
        return ()
    options = dict(job.optimizer.groups[0]) if job.optimizer.groups else {}
    found = State(0)
    for part in parts:
        found += rule((part,), (part,), MASTER, options)
    place = host(job, away=zero.offload_state)
    counted = "device" if steps_on_device(job.optimizer) else host(job, away=True)
    kept = term("optimizer state", found.bytes, f"of {job.optimizer.name}, float32", place, found.label)
    return (kept, term("optimizer state", found.step, "step counters", counted, found.label))
