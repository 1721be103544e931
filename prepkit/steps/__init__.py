"""The closed union of step kinds: one thing to do each, as plain data.

A step says everything that its handler needs. It never names a rank or a live object: what depends on the rank is
symbolic (``LocalDevice``) and bound in the handler; modules and parameters are named by canonical path.
"""

from __future__ import annotations

from prepkit.steps.common import Axis, File, LocalDevice
from prepkit.steps.ddp import ConvertSyncBatchNorm, DDPCommHook, PowerSGDOptions, WrapDDP
from prepkit.steps.deepspeed import ConvertOptimizer, InitializeDeepSpeed, MarkLeafModules, PartitionParameters, Setting
from prepkit.steps.entry_points import RegisterEntryPoints
from prepkit.steps.fp8 import (
    AutocastFP8Forward,
    ConvertFP8Linears,
    ConvertTransformerEngine,
    InitializeMSAMP,
    PrecomputeFloat8Scales,
)
from prepkit.steps.fsdp1 import FlatUnit, RegroupOptimizer, WrapFSDP1
from prepkit.steps.fsdp2 import AverageGradients, ShardUnits, Unit
from prepkit.steps.loaders import ShardLoader, WrapLoader
from prepkit.steps.model import (
    AutocastForward,
    BackendOption,
    CastForward,
    CheckpointModules,
    CompileModules,
    MakeContiguous,
    MoveModel,
    UpcastParameters,
)
from prepkit.steps.optimizer import (
    CreateGradScaler,
    CreateOptimizer,
    OptimizerGroup,
    OptimizerOption,
    RebindOptimizer,
    ReleaseOptimizer,
)
from prepkit.steps.process_group import Agree, BuildMesh, StartProcessGroup
from prepkit.steps.tensor_parallel import ParallelizeModules, ParallelStyle
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
from prepkit.steps.xla import MoveToXLA, ReduceXLAGradients

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
