"""The kinds of steps by name, and those that a table of the tests leaves out, with the reason.

A new kind of step stands here once. That it is in the other tables too (``test_step_text.STEPS``,
``planted_faults.FAULTS``) is asked there.
"""

from __future__ import annotations

from prepkit.steps import (
    Agree,
    CheckFiles,
    ConvertOptimizer,
    MoveToXLA,
    ReleaseOptimizer,
    StartProcessGroup,
)

STEP_KINDS = """
Agree AutocastFP8Forward AutocastForward AverageGradients BuildMesh CastForward CheckpointModules CompileModules
ConvertFP8Linears ConvertOptimizer ConvertSyncBatchNorm ConvertTransformerEngine CreateGradScaler CreateOptimizer
InitializeDeepSpeed InitializeMSAMP MakeContiguous MarkLeafModules MoveModel MoveToXLA ParallelizeModules
PartitionParameters PrecomputeFloat8Scales
RebindOptimizer ReduceXLAGradients RegroupOptimizer ReleaseOptimizer ShardLoader ShardUnits StartProcessGroup
UpcastParameters WrapDDP WrapFSDP1 WrapLoader
AllocateTensors CheckFiles InitializeTensors ReadTensors RegisterEntryPoints SendTensors StashTensors
"""
"""The kinds that files of format 2 may hold. Removing or renaming one needs another format number."""

WITHOUT_A_PLANTED_FAULT = {
    StartProcessGroup: "leaves nothing behind that a fault could be seen at",
    Agree: "likewise",
    ReleaseOptimizer: "likewise",
    CheckFiles: "likewise",
    MoveToXLA: "the double of its library is on the CPU, which is wrong already",
    ConvertOptimizer: "DeepSpeed would have to compile what it puts in place",
}

WITHOUT_A_PLACE_WHERE_IT_FAILS = {
    ConvertOptimizer: "DeepSpeed would have to compile what it puts in place",
}
"""Step kinds that no engine of the fault matrix has."""
