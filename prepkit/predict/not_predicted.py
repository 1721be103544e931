"""Steps whose bytes no formula here knows, or only from above."""

from __future__ import annotations

from prepkit.plan import Plan
from prepkit.resolve.modules import PACKED
from prepkit.steps import (
    AutocastFP8Forward,
    ConvertFP8Linears,
    ConvertSyncBatchNorm,
    ConvertTransformerEngine,
    InitializeDeepSpeed,
    InitializeMSAMP,
    ParallelizeModules,
    PrecomputeFloat8Scales,
    Step,
)


def hidden(plan: Plan) -> tuple[str, ...]:
    """Why nothing can be said of the plan; empty where something can."""
    if any(_by_msamp(planned.step) for planned in plan.steps):
        return ("everything: MS-AMP replaces weights and optimizer by its own",)
    return ()


def _by_msamp(step: Step) -> bool:
    return isinstance(step, InitializeMSAMP) or (isinstance(step, InitializeDeepSpeed) and step.library == "msamp")


def unknown(plan: Plan) -> tuple[str, ...]:
    """What is there beside the numbers, one phrase each."""
    found: dict[str, None] = {}
    if any(one.cls in PACKED for one in plan.layout):
        found["what unpacks packed weights: scales and tables"] = None
    for planned in plan.steps:
        match planned.step:
            case ConvertSyncBatchNorm():
                found["what SyncBatchNorm sends: it follows the model's inputs"] = None
            case ConvertTransformerEngine() | AutocastFP8Forward():
                found["TransformerEngine's float8 copies of weights and its histories of scales"] = None
            case ConvertFP8Linears():
                found["float8 copies of weights and activations, made and freed within one layer"] = None
            case PrecomputeFloat8Scales():
                found["the reduction of float8 scales, four bytes a weight"] = None
            case ParallelizeModules():
                found["what cut layers send within forward and backward: it follows the model's inputs"] = None
            case _:
                pass
    return tuple(found)


def narrower(plan: Plan) -> bool:
    """Whether some weights are gathered in fewer bytes than is counted: in float8."""
    return any(isinstance(planned.step, ConvertFP8Linears) and planned.step.all_gather for planned in plan.steps)
