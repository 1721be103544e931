"""Weights by their fingerprints: unchanged by the steps, and equal on all ranks that hold the same of them."""

from __future__ import annotations

from attrs import evolve
from torch.nn import Module

from prepkit.applying.checks.buffers import REWRITES
from prepkit.objects.names import named_parameters
from prepkit.observe import fingerprints
from prepkit.observe.fingerprints.tensor import as_hex
from prepkit.plan import Plan
from prepkit.plan.attestation import Attestation, each
from prepkit.steps import InitializeTensors, ReadTensors

FILLS = (InitializeTensors, ReadTensors)
"""Step kinds that write other values over those which the model was built with."""


def before(plan: Plan, model: Module) -> dict[str, int]:
    """Fingerprints before the first step of what this rank has whole, in the dtype that each is to have."""
    return fingerprints.before(model, _dtypes(plan, model))


def attested(attestation: Attestation, plan: Plan, model: Module, before: dict[str, int]) -> Attestation:
    """The attestation with the weights as they now stand, and two checks of them. Collective."""
    now = fingerprints.fingerprints(model)
    steps = [planned.step for planned in plan.steps]
    filled = any(isinstance(step, FILLS) for step in steps)
    sent = any(REWRITES[type(step)](step, attestation.rank) for step in steps if type(step) in REWRITES)
    kept = {} if filled or (sent and attestation.rank) else before
    changed = [
        f"{name} holds other values than before" for name in kept if now.values.get(name, kept[name]) != kept[name]
    ]
    unequal = [f"{name} differs between ranks that hold the same of it" for name in now.parted]
    return evolve(
        attestation,
        fingerprints=tuple((name, as_hex(now.values[name])) for name in sorted(now.values)),
        checks=(
            *attestation.checks,
            *((each("model", "weights kept their values", changed),) if kept else ()),
            each("model", "weights are equal on all ranks", unequal),
        ),
    )


def _dtypes(plan: Plan, model: Module) -> dict[str, str]:
    """Of every parameter that a step casts; a conversion that is no cast, as of packed weights, is none."""
    now = {name: str(param.dtype).removeprefix("torch.") for name, param in named_parameters(model).items()}
    return {one.name: one.dtype for one in plan.layout if now.get(one.name, one.dtype) != one.dtype}
