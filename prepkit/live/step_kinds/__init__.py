"""The kinds of steps: how each is done, how its outcome is verified, and how it is rehearsed.

The one table to write a row in for a new kind. It stands above the handlers, which read their step and the target and
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from attrs import frozen

from prepkit import steps
from prepkit.live.checks import deepspeed as deepspeed_checks
from prepkit.live.checks import entry_points as entry_checks
from prepkit.live.checks import forward as forward_checks
from prepkit.live.checks import fp8 as fp8_checks
from prepkit.live.checks import fsdp2 as fsdp2_checks
from prepkit.live.checks import loaders as loader_checks
from prepkit.live.checks import optimizer_steps as optimizer_checks
from prepkit.live.checks import steps as checks
from prepkit.live.checks import xla as xla_checks
from prepkit.live.handlers import (
    allocate,
    average_gradients,
    check_files,
    checkpointing,
    compilation,
    ddp,
    deepspeed,
    entry_points,
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
    zero3_partition,
)
from prepkit.live.interpreter import Handler
from prepkit.live.model.state import LiveModel
from prepkit.live.model.target import Target
from prepkit.live.step_kinds import rehearsed
from prepkit.live.step_kinds.rehearsed import Substitute, as_written, skipped
from prepkit.plan.attestation import Check


@frozen(kw_only=True)
class StepKind:
    """What ``apply`` and ``rehearse`` know of one kind of step."""

    handler: Handler[Any, Target, Any]
    """Whether it can be done, how it is done, and how it is undone."""
    verify: Callable[[Any, LiveModel], Iterator[Check]]
    """Looks at what the step has left behind; ``checks.nothing`` where that cannot be seen."""
    rehearse: Callable[[Any], Substitute]
    """The step that a rehearsal runs in its place, if any, and what of it is not as written."""


KINDS: dict[type, StepKind] = {
    steps.StartProcessGroup: StepKind(
        handler=process_group.START,
        verify=checks.process_group,
        rehearse=rehearsed.fake_group,
    ),
    steps.Agree: StepKind(
        handler=process_group.AGREE,
        verify=checks.nothing,
        rehearse=skipped("the fake group carries no data, so there is nobody to ask"),
    ),
    steps.BuildMesh: StepKind(
        handler=process_group.MESH,
        verify=checks.mesh,
        rehearse=rehearsed.on_cpu,
    ),
    steps.ReleaseOptimizer: StepKind(
        handler=optimizer.RELEASE,
        verify=checks.nothing,
        rehearse=as_written,
    ),
    steps.UpcastParameters: StepKind(
        handler=model.UPCAST,
        verify=checks.upcast,
        rehearse=as_written,
    ),
    steps.MakeContiguous: StepKind(
        handler=model.CONTIGUOUS,
        verify=checks.contiguous,
        rehearse=as_written,
    ),
    steps.MoveModel: StepKind(
        handler=model.MOVE,
        verify=checks.moved,
        rehearse=rehearsed.not_moved,
    ),
    steps.AutocastForward: StepKind(
        handler=model.AUTOCAST,
        verify=checks.autocast,
        rehearse=rehearsed.on_cpu,
    ),
    steps.ParallelizeModules: StepKind(
        handler=tensor_parallel.PARALLELIZE,
        verify=checks.parallelized,
        rehearse=as_written,
    ),
    steps.CheckpointModules: StepKind(
        handler=checkpointing.CHECKPOINT,
        verify=forward_checks.checkpointed,
        rehearse=as_written,
    ),
    steps.CompileModules: StepKind(
        handler=compilation.COMPILE,
        verify=forward_checks.compiled,
        rehearse=as_written,
    ),
    steps.ShardUnits: StepKind(
        handler=fsdp2.SHARD,
        verify=checks.units,
        rehearse=rehearsed.unpinned,
    ),
    steps.AverageGradients: StepKind(
        handler=average_gradients.AVERAGE,
        verify=fsdp2_checks.averaged,
        rehearse=as_written,
    ),
    steps.ConvertSyncBatchNorm: StepKind(
        handler=sync_batch_norm.CONVERT,
        verify=checks.batch_norms,
        rehearse=as_written,
    ),
    steps.WrapFSDP1: StepKind(
        handler=fsdp1.WRAP,
        verify=checks.fsdp1_units,
        rehearse=rehearsed.wrap_fsdp1,
    ),
    steps.RegroupOptimizer: StepKind(
        handler=fsdp1_optimizer.REGROUP,
        verify=optimizer_checks.regrouped,
        rehearse=as_written,
    ),
    steps.WrapDDP: StepKind(
        handler=ddp.WRAP,
        verify=checks.ddp,
        rehearse=rehearsed.wrap_ddp,
    ),
    steps.RebindOptimizer: StepKind(
        handler=optimizer.REBIND,
        verify=optimizer_checks.rebound,
        rehearse=as_written,
    ),
    steps.CreateOptimizer: StepKind(
        handler=optimizer.CREATE,
        verify=optimizer_checks.created,
        rehearse=as_written,
    ),
    steps.CreateGradScaler: StepKind(
        handler=grad_scaler.SCALER,
        verify=checks.grad_scaler,
        rehearse=rehearsed.on_cpu,
    ),
    steps.ShardLoader: StepKind(
        handler=loaders.SHARD,
        verify=loader_checks.divided,
        rehearse=skipped("loaders are not copied"),
    ),
    steps.WrapLoader: StepKind(
        handler=loaders.WRAP,
        verify=loader_checks.wrapped,
        rehearse=skipped("loaders are not copied"),
    ),
    steps.ConvertFP8Linears: StepKind(
        handler=fp8.CONVERT,
        verify=fp8_checks.converted,
        rehearse=rehearsed.where_torchao_is,
    ),
    steps.ConvertTransformerEngine: StepKind(
        handler=transformer_engine.CONVERT,
        verify=fp8_checks.engine,
        rehearse=skipped("TransformerEngine runs on a GPU only"),
    ),
    steps.AutocastFP8Forward: StepKind(
        handler=transformer_engine.AUTOCAST,
        verify=fp8_checks.autocast,
        rehearse=skipped("TransformerEngine runs on a GPU only"),
    ),
    steps.InitializeMSAMP: StepKind(
        handler=fp8.MSAMP,
        verify=fp8_checks.msamp,
        rehearse=skipped("MS-AMP runs on a GPU only"),
    ),
    steps.PrecomputeFloat8Scales: StepKind(
        handler=fp8.SCALES,
        verify=fp8_checks.scales,
        rehearse=rehearsed.where_torchao_is,
    ),
    steps.MoveToXLA: StepKind(
        handler=xla.MOVE,
        verify=xla_checks.moved,
        rehearse=skipped("torch_xla has no device without data"),
    ),
    steps.ReduceXLAGradients: StepKind(
        handler=xla.REDUCE,
        verify=xla_checks.reduced,
        rehearse=skipped("torch_xla has no device without data"),
    ),
    steps.CastForward: StepKind(
        handler=deepspeed.CAST,
        verify=deepspeed_checks.cast,
        rehearse=as_written,
    ),
    steps.MarkLeafModules: StepKind(
        handler=deepspeed.LEAVES,
        verify=deepspeed_checks.leaves,
        rehearse=as_written,
    ),
    steps.ConvertOptimizer: StepKind(
        handler=deepspeed.CONVERT,
        verify=deepspeed_checks.converted,
        rehearse=rehearsed.not_compiled,
    ),
    steps.PartitionParameters: StepKind(
        handler=zero3_partition.PARTITION,
        verify=deepspeed_checks.partitioned,
        rehearse=rehearsed.partition_parameters,
    ),
    steps.InitializeDeepSpeed: StepKind(
        handler=deepspeed.INITIALIZE,
        verify=deepspeed_checks.initialised,
        rehearse=rehearsed.initialize_deepspeed,
    ),
    steps.RegisterEntryPoints: StepKind(
        handler=entry_points.REGISTER,
        verify=entry_checks.checks,
        rehearse=as_written,
    ),
    steps.CheckFiles: StepKind(
        handler=check_files.CHECK,
        verify=checks.nothing,
        rehearse=skipped("a meta copy has no values, and gets none"),
    ),
    steps.AllocateTensors: StepKind(
        handler=allocate.ALLOCATE,
        verify=checks.allocated,
        rehearse=skipped("a meta copy has no values, and gets none"),
    ),
    steps.InitializeTensors: StepKind(
        handler=init_weights.INITIALIZE,
        verify=checks.nothing,
        rehearse=skipped("a meta copy has no values, and gets none"),
    ),
    steps.ReadTensors: StepKind(
        handler=read_weights.READ,
        verify=checks.nothing,
        rehearse=skipped("a meta copy has no values, and gets none"),
    ),
    steps.StashTensors: StepKind(
        handler=stash.STASH,
        verify=checks.nothing,
        rehearse=skipped("a meta copy carries no data, so there is nothing to set aside or to send"),
    ),
    steps.SendTensors: StepKind(
        handler=send_weights.SEND,
        verify=checks.sent,
        rehearse=skipped("a meta copy carries no data, so there is nothing to set aside or to send"),
    ),
}


def handlers() -> dict[type, Handler[Any, Target, Any]]:
    """The handlers alone, as ``interpret`` takes them."""
    return {step: kind.handler for step, kind in KINDS.items()}
