"""Steps whose bytes no formula here knows, or only from above."""

from __future__ import annotations

from prepkit import steps
from prepkit.plan import Plan
from prepkit.resolve.modules import PACKED
from prepkit.steps import Step

_TRANSFORMER_ENGINE = "TransformerEngine's float8 copies of weights and its histories of scales"

LEFT_OUT: dict[type, str] = {
    steps.ConvertSyncBatchNorm: "what SyncBatchNorm sends: it follows the model's inputs",
    steps.ConvertTransformerEngine: _TRANSFORMER_ENGINE,
    steps.AutocastFP8Forward: _TRANSFORMER_ENGINE,
    steps.ConvertFP8Linears: "float8 copies of weights and activations, made and freed within one layer",
    steps.PrecomputeFloat8Scales: "the reduction of float8 scales, four bytes a weight",
    steps.ParallelizeModules: "what cut layers send within forward and backward: it follows the model's inputs",
}
"""Step kind to the bytes that it brings and no formula counts."""

COUNTED = frozenset(
    (
        *(steps.StartProcessGroup, steps.BuildMesh, steps.Agree, steps.CheckFiles, steps.MoveModel, steps.MoveToXLA),
        *(steps.AllocateTensors, steps.InitializeTensors, steps.ReadTensors, steps.SendTensors, steps.StashTensors),
        *(steps.AutocastForward, steps.CastForward, steps.UpcastParameters, steps.MakeContiguous),
        *(steps.CheckpointModules, steps.CompileModules, steps.RegisterEntryPoints, steps.MarkLeafModules),
        *(steps.WrapDDP, steps.WrapFSDP1, steps.ShardUnits, steps.PartitionParameters, steps.AverageGradients),
        *(steps.InitializeDeepSpeed, steps.InitializeMSAMP, steps.ReduceXLAGradients, steps.CreateGradScaler),
        *(steps.CreateOptimizer, steps.ConvertOptimizer, steps.RebindOptimizer, steps.RegroupOptimizer),
        *(steps.ReleaseOptimizer, steps.ShardLoader, steps.WrapLoader),
    )
)
"""Step kinds whose bytes are in the formulas, or that bring none within a step of training.

With ``LEFT_OUT`` these are all kinds: a new one is in neither until somebody has looked at what it allocates and sends.
"""


def hidden(plan: Plan) -> tuple[str, ...]:
    """Why nothing at all can be predicted of the plan; empty where something can."""
    if any(_by_msamp(planned.step) for planned in plan.steps):
        return ("everything: MS-AMP replaces weights and optimizer by its own",)
    return ()


def _by_msamp(step: Step) -> bool:
    return isinstance(step, steps.InitializeMSAMP) or (
        isinstance(step, steps.InitializeDeepSpeed) and step.library == "msamp"
    )


def left_out(plan: Plan) -> tuple[str, ...]:
    """Return what takes bytes and is in no number, one phrase each, in the order of the steps.

    Raises ``LookupError`` for a step kind that is in no table here.
    """
    phrases: dict[str, None] = {}
    if any(param.cls in PACKED for param in plan.facts.model.params):
        phrases["what unpacks packed weights: scales and tables"] = None
    for planned in plan.steps:
        kind = type(planned.step)
        if kind in LEFT_OUT:
            phrases[LEFT_OUT[kind]] = None
        elif kind not in COUNTED:
            raise LookupError(f"{kind.__name__} is in neither table of prepkit/predict/not_predicted.py; add it to one")
    return tuple(phrases)


def narrower(plan: Plan) -> bool:
    """True where some weights are gathered in float8, in fewer bytes than are counted."""
    return any(isinstance(planned.step, steps.ConvertFP8Linears) and planned.step.all_gather for planned in plan.steps)
