"""What the terms of every ZeRO stage share: places, optimizer state, the step's copies."""

from __future__ import annotations

from prepkit.predict.inputs import Inputs
from prepkit.predict.optimizers import StateBytes, state_formula, steps_on_device
from prepkit.predict.prediction import Category, Label, Lifetime, Place, Term
from prepkit.predict.zero_inputs import Zero

MASTER = 4
"""Bytes of one element of the float32 copy that is stepped; there is one also of a float32 model."""


def term(
    category: Category,
    size: int,
    what: str,
    place: Place = "device",
    label: Label = Label.EXACT,
    lifetime: Lifetime = Lifetime.ALWAYS,
) -> Term:
    """A ``Term``; what most terms have need not be said."""
    return Term(category=category, bytes=size, what=what, place=place, label=label, lifetime=lifetime)


def working(size: int, what: str, label: Label = Label.BOUNDED, lifetime: Lifetime = Lifetime.PASS) -> Term:
    """A buffer that is allocated and freed within a step."""
    return term("working buffers", size, what, label=label, lifetime=lifetime)


def host(inputs: Inputs, *, away: bool) -> Place:
    """Where offloaded tensors are; on a CPU there is one memory."""
    return "host" if away and inputs.device != "cpu" else "device"


def locked(inputs: Inputs, category: Category, size: int, what: str, *, pins: bool = True) -> Term:
    """Bytes in host memory that are page-locked for an accelerator: torch rounds such a block up to a power of two.

    ``CachingHostAllocatorImpl::allocate``; on a CPU DeepSpeed locks nothing, and the number is exact.
    """
    rounds = pins and inputs.device != "cpu" and size > 0
    label = Label.BOUNDED if rounds else Label.EXACT
    allocated = 1 << (size - 1).bit_length() if rounds else size
    return term(category, allocated, what, host(inputs, away=True), label)


def state(inputs: Inputs, zero: Zero, parts: tuple[int, ...]) -> tuple[Term, ...]:
    """Optimizer state of the float32 master weights, one flat tensor of so many elements for each of ``parts``."""
    bytes_of = state_formula(inputs.optimizer) if inputs.optimizer else None
    if bytes_of is None or inputs.optimizer is None:
        return ()
    total = StateBytes(0)
    for part in parts:
        total += bytes_of((part,), (part,), MASTER, 0)
    place = host(inputs, away=zero.offload_state)
    counters = "device" if steps_on_device(inputs.optimizer) else host(inputs, away=True)
    kept = term("optimizer state", total.bytes, f"of {inputs.optimizer.name}, float32", place, total.label)
    return (kept, term("optimizer state", total.step, "step counters", counters, total.label))
