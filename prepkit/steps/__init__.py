"""The closed union of step kinds: one thing to do each, as plain data.

A step says everything that its handler needs. It never names a rank or a live object: what depends on the rank is
symbolic (``LocalDevice``) and bound in the handler; modules and parameters are named by canonical path.
"""

from __future__ import annotations

from prepkit.steps.common import Agree, Axis, BuildMesh, File, LocalDevice, StartProcessGroup
from prepkit.steps.engines import (
    AverageGradients,
    ConvertOptimizer,
    ConvertSyncBatchNorm,
    DDPCommHook,
    FlatUnit,
    InitializeDeepSpeed,
    MarkLeafModules,
    MoveToXLA,
    ParallelizeModules,
    ParallelStyle,
    PartitionParameters,
    PowerSGDOptions,
    ReduceXLAGradients,
    RegroupOptimizer,
    Setting,
    ShardUnits,
    Unit,
    WrapDDP,
    WrapFSDP1,
)
from prepkit.steps.model import (
    AutocastForward,
    AutocastFP8Forward,
    BackendOption,
    CastForward,
    CheckpointModules,
    CompileModules,
    ConvertFP8Linears,
    ConvertTransformerEngine,
    InitializeMSAMP,
    MakeContiguous,
    MoveModel,
    PrecomputeFloat8Scales,
    RegisterEntryPoints,
    UpcastParameters,
)
from prepkit.steps.optimizer import (
    CreateGradScaler,
    CreateOptimizer,
    OptimizerGroup,
    OptimizerOption,
    RebindOptimizer,
    ReleaseOptimizer,
    ShardLoader,
    WrapLoader,
)
from prepkit.steps.weights import (
    AllocateTensors,
    CheckFiles,
    Chunk,
    FileSlice,
    FlatPlace,
    InitializeTensors,
    ReadTensors,
    SendTensors,
    StashTensors,
    Transfer,
)

Step = (
    StartProcessGroup
    | Agree
    | BuildMesh
    | ReleaseOptimizer
    | UpcastParameters
    | MakeContiguous
    | MoveModel
    | AutocastForward
    | ParallelizeModules
    | CheckpointModules
    | CompileModules
    | ShardUnits
    | AverageGradients
    | ConvertSyncBatchNorm
    | WrapFSDP1
    | RegroupOptimizer
    | WrapDDP
    | RebindOptimizer
    | CreateOptimizer
    | CreateGradScaler
    | ShardLoader
    | WrapLoader
    | WrapLoader
    | ConvertFP8Linears
    | ConvertTransformerEngine
    | AutocastFP8Forward
    | InitializeMSAMP
    | PrecomputeFloat8Scales
    | MoveToXLA
    | ReduceXLAGradients
    | CastForward
    | MarkLeafModules
    | ConvertOptimizer
    | PartitionParameters
    | InitializeDeepSpeed
    | CheckFiles
    | AllocateTensors
    | InitializeTensors
    | ReadTensors
    | StashTensors
    | SendTensors
    | RegisterEntryPoints
)
