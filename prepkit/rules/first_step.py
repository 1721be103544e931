"""The gradients of the first window. They are known once there are some: ``Prepared.step`` asks, not ``check``."""

from __future__ import annotations

from prepkit.rules.memory import later
from prepkit.rules.rule import Rule

NO_GRADIENT = Rule(
    id="first-step.no-gradient",
    summary="Every trained parameter has a gradient when the optimizer acts for the first time.",
    check=later,
    fix="Freeze what has no part in the loss, with requires_grad_(False) before build_plan, or let it have one.",
    source=("K-H1", "pain 26"),
)
NOT_FINITE = Rule(
    id="first-step.not-finite",
    summary="Every gradient of the first window is finite.",
    check=later,
    fix="Look for the batch, the weight or the layer that is not finite: nothing has been stepped yet.",
)
REPLICAS_DIFFER = Rule(
    id="first-step.replicas-differ",
    summary="Ranks that hold the same parameter hold the same gradient when the optimizer acts for the first time.",
    check=later,
    fix="Call ready.model itself in training: what goes past its forward is averaged by nobody.",
    overridable=False,
    source=("torch DistributedDataParallel.forward",),
)
MISPLACED = Rule(
    id="first-step.misplaced",
    summary="Every gradient has the placements and the dtype of its parameter.",
    check=later,
    fix="Report it: torch laid the gradient out otherwise than the parameter.",
    overridable=False,
)

FIRST_STEP_RULES: tuple[Rule, ...] = (NO_GRADIENT, NOT_FINITE, REPLICAS_DIFFER, MISPLACED)
"""Rules about gradients, in the order in which they are asked."""
