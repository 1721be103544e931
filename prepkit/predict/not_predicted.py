"""Steps whose bytes no formula here knows, or only from above."""

from __future__ import annotations

from prepkit.plan import Plan
from prepkit.resolve.modules import PACKED
from prepkit.steps import (
    Agree,
    AllocateTensors,
    AutocastForward,
    AutocastFP8Forward,
    AverageGradients,
    BuildMesh,
    CastForward,
    CheckFiles,
    CheckpointModules,
    CompileModules,
    ConvertFP8Linears,
    ConvertOptimizer,
    ConvertSyncBatchNorm,
    ConvertTransformerEngine,
    CreateGradScaler,
    CreateOptimizer,
    InitializeDeepSpeed,
    InitializeMSAMP,
    InitializeTensors,
    MakeContiguous,
    MarkLeafModules,
    MoveModel,
    MoveToXLA,
    ParallelizeModules,
    PartitionParameters,
    PrecomputeFloat8Scales,
    ReadTensors,
    RebindOptimizer,
    ReduceXLAGradients,
    RegisterEntryPoints,
    RegroupOptimizer,
    ReleaseOptimizer,
    SendTensors,
    ShardLoader,
    ShardUnits,
    StartProcessGroup,
    StashTensors,
    Step,
    UpcastParameters,
    WrapDDP,
    WrapFSDP1,
    WrapLoader,
)

_TRANSFORMER_ENGINE = "TransformerEngine's float8 copies of weights and its histories of scales"

LEFT_OUT: dict[type, str] = {
    ConvertSyncBatchNorm: "what SyncBatchNorm sends: it follows the model's inputs",
    ConvertTransformerEngine: _TRANSFORMER_ENGINE,
    AutocastFP8Forward: _TRANSFORMER_ENGINE,
    ConvertFP8Linears: "float8 copies of weights and activations, made and freed within one layer",
    PrecomputeFloat8Scales: "the reduction of float8 scales, four bytes a weight",
    ParallelizeModules: "what cut layers send within forward and backward: it follows the model's inputs",
}
"""Step kind to the bytes that it brings and no formula counts."""

COUNTED = frozenset(
    {
        Agree,
        AllocateTensors,
        AutocastForward,
        AverageGradients,
        BuildMesh,
        CastForward,
        CheckFiles,
        CheckpointModules,
        CompileModules,
        ConvertOptimizer,
        CreateGradScaler,
        CreateOptimizer,
        InitializeDeepSpeed,
        InitializeMSAMP,
        InitializeTensors,
        MakeContiguous,
        MarkLeafModules,
        MoveModel,
        MoveToXLA,
        PartitionParameters,
        ReadTensors,
        RebindOptimizer,
        RegisterEntryPoints,
        ReduceXLAGradients,
        RegroupOptimizer,
        ReleaseOptimizer,
        SendTensors,
        ShardLoader,
        ShardUnits,
        StartProcessGroup,
        StashTensors,
        UpcastParameters,
        WrapDDP,
        WrapFSDP1,
        WrapLoader,
    }
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
    return isinstance(step, InitializeMSAMP) or (isinstance(step, InitializeDeepSpeed) and step.library == "msamp")


def left_out(plan: Plan) -> tuple[str, ...]:
    """What takes bytes and is in no number, one phrase each, in the order of the steps.

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
    """Whether some weights are gathered in fewer bytes than is counted: in float8."""
    return any(isinstance(planned.step, ConvertFP8Linears) and planned.step.all_gather for planned in plan.steps)
