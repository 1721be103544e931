"""How each step kind is done. A handler reads its step and the target, and nothing else."""

from __future__ import annotations

from typing import Any

from prepkit import steps
from prepkit.live.handlers import (
    allocate,
    check_files,
    ddp,
    deepspeed,
    fp8,
    fsdp1,
    fsdp1_optimizer,
    fsdp2,
    grad_scaler,
    init_weights,
    loaders,
    model,
    optimizer,
    process_group,
    read_weights,
    send_weights,
    stash,
    sync_batch_norm,
    tensor_parallel,
    transformer_engine,
    xla,
)
from prepkit.live.interpreter import Handler
from prepkit.live.model.target import Target

HANDLERS: dict[type, Handler[Any, Target, Any]] = {
    steps.StartProcessGroup: process_group.START,
    steps.Agree: process_group.AGREE,
    steps.BuildMesh: process_group.MESH,
    steps.ReleaseOptimizer: optimizer.RELEASE,
    steps.UpcastParameters: model.UPCAST,
    steps.MoveModel: model.MOVE,
    steps.AutocastForward: model.AUTOCAST,
    steps.ParallelizeModules: tensor_parallel.PARALLELIZE,
    steps.CheckpointModules: model.CHECKPOINT,
    steps.CompileModules: model.COMPILE,
    steps.ShardUnits: fsdp2.SHARD,
    steps.ConvertSyncBatchNorm: sync_batch_norm.CONVERT,
    steps.WrapFSDP1: fsdp1.WRAP,
    steps.RegroupOptimizer: fsdp1_optimizer.REGROUP,
    steps.WrapDDP: ddp.WRAP,
    steps.RebindOptimizer: optimizer.REBIND,
    steps.CreateOptimizer: optimizer.CREATE,
    steps.CreateGradScaler: grad_scaler.SCALER,
    steps.ShardLoader: loaders.LOADER,
    steps.ConvertFP8Linears: fp8.CONVERT,
    steps.ConvertTransformerEngine: transformer_engine.CONVERT,
    steps.AutocastFP8Forward: transformer_engine.AUTOCAST,
    steps.InitializeMSAMP: fp8.MSAMP,
    steps.PrecomputeFloat8Scales: fp8.SCALES,
    steps.MoveToXLA: xla.MOVE,
    steps.ReduceXLAGradients: xla.REDUCE,
    steps.CastForward: deepspeed.CAST,
    steps.MarkLeafModules: deepspeed.LEAVES,
    steps.ConvertOptimizer: deepspeed.CONVERT,
    steps.InitializeDeepSpeed: deepspeed.INITIALIZE,
    steps.CheckFiles: check_files.CHECK,
    steps.AllocateTensors: allocate.ALLOCATE,
    steps.InitializeTensors: init_weights.INITIALIZE,
    steps.ReadTensors: read_weights.READ,
    steps.StashTensors: stash.STASH,
    steps.SendTensors: send_weights.SEND,
}
"""Step kind to its handler."""
