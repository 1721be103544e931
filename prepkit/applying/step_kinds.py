"""The kinds of steps, one row each: how a step is done, how its outcome is verified, and what a rehearsal runs for it.

A new kind of step gets a row in ``KINDS``. Handlers, which are below, read their step and the target and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from attrs import evolve, frozen

from prepkit import steps
from prepkit.applying.checks import forward as forward_checks
from prepkit.applying.checks import fsdp as fsdp_checks
from prepkit.applying.checks import steps as checks
from prepkit.applying.handlers import (
    allocate,
    check_files,
    checkpointing,
    compilation,
    ddp,
    deepspeed,
    entry_points,
    fp8,
    fsdp1,
    fsdp2,
    gradients,
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
from prepkit.applying.handlers.ddp import can_send_nothing
from prepkit.applying.handlers.swap_layers import library_problems
from prepkit.facts.run import Departure
from prepkit.interpreter import Handler
from prepkit.objects.deepspeed import rehearsable, rehearsable_settings
from prepkit.objects.state import LiveModel
from prepkit.objects.target import Target
from prepkit.steps import (
    AutocastForward,
    BuildMesh,
    ConvertFP8Linears,
    ConvertOptimizer,
    CreateGradScaler,
    InitializeDeepSpeed,
    LocalDevice,
    MoveModel,
    PartitionParameters,
    PrecomputeFloat8Scales,
    ShardUnits,
    StartProcessGroup,
    Step,
    WrapDDP,
    WrapFSDP1,
)

Substitute = tuple[Step | None, str]
"""The step that is run in its place, None where none is; and what is not as written, empty where everything is."""

OnDevice = TypeVar("OnDevice", BuildMesh, AutocastForward, CreateGradScaler)


def as_written(step: Step) -> Substitute:
    """The step itself."""
    return step, ""


def skipped(why: str) -> Callable[[Step], Substitute]:
    """No step, for this reason."""
    return lambda _: (None, why)


def on_cpu(step: OnDevice) -> Substitute:
    """The same step on the CPU."""
    return (step, "") if step.device == "cpu" else (evolve(step, device="cpu"), f"the CPU stands in for {step.device}")


def fake_group(step: StartProcessGroup) -> Substitute:
    """The rehearsal has started torch's fake group."""
    return None, f"a fake group of {step.world_size} ranks stands in for {step.backend}"


def not_moved(step: MoveModel) -> Substitute:
    """Return what is on meta stays there."""
    return None, f"a meta copy has no data to move to {step.device.type}"


def unpinned(step: ShardUnits) -> Substitute:
    """Sharding without pinned host memory."""
    if not step.pin_memory:
        return step, ""
    return evolve(step, pin_memory=False), "there is no data whose memory could be pinned"


def wrap_fsdp1(step: WrapFSDP1) -> Substitute:
    """FSDP1 on the CPU that broadcasts nothing."""
    if step.device.type == "cpu" and not step.sync_module_states:
        return step, ""
    why = f"the CPU stands in for {step.device.type}, and nothing is broadcast"
    return evolve(step, device=LocalDevice(type="cpu"), sync_module_states=False), why


def wrap_ddp(step: WrapDDP) -> Substitute:
    """DDP that sends nothing (``handlers.ddp.WITHOUT_VALUES``); its bfloat16 hooks need NCCL to be registered."""
    if not can_send_nothing():
        return None, "DDP sends values, unless it is that of torch 2.7 or newer, and a meta copy has none"
    low = step.hook is not None and "bf16" in f"{step.hook.hook} {step.hook.wrapper}"
    why = "a meta copy has no values to send" + (", and no NCCL for bfloat16" if low else "")
    return evolve(step, device=None, hook=None if low else step.hook), why


def where_torchao_is(step: ConvertFP8Linears | PrecomputeFloat8Scales) -> Substitute:
    """Torchao's float8 can be had on the CPU, if it is installed."""
    return (None, "torchao is not installed here") if library_problems("torchao.float8", "torchao") else (step, "")


def not_compiled(step: ConvertOptimizer) -> Substitute:
    """The optimizer stays as it is."""
    return None, f"{step.algorithm} would have to be compiled; the optimizer stands in for it"


def partition_parameters(step: PartitionParameters) -> Substitute:
    """The step itself on the CPU, for zeros that stand in for the parameters."""
    small = rehearsable(step.settings)
    return evolve(step, device=LocalDevice(type="cpu"), settings=small), "zeros on the CPU are divided"


def initialize_deepspeed(step: InitializeDeepSpeed) -> Substitute:
    """DeepSpeed on the CPU, with buckets that fit a laptop."""
    return (None, "MS-AMP runs on a GPU only") if step.library == "msamp" else rehearsable_settings(step)


NO_VALUES = skipped("a meta copy has no values, and gets none")
NO_DATA = skipped("a meta copy carries no data, so there is nothing to set aside or to send")
NOBODY = skipped("the fake group carries no data, so there is nobody to ask")
NO_LOADERS = skipped("loaders are not copied")
NO_ENGINE = skipped("TransformerEngine runs on a GPU only")
NO_XLA = skipped("torch_xla has no device without data")


@frozen
class StepKind:
    """What ``apply`` and ``rehearse`` know of one kind of step."""

    handler: Handler[Any, Target, Any]
    """Says whether the step can be done, does it, and undoes it."""
    verify: Callable[[Any, LiveModel], Iterator[Departure]]
    """Looks at what the step has left; ``checks.nothing`` where that cannot be seen."""
    rehearse: Callable[[Any], Substitute]
    """The step that a rehearsal runs in its place, if any, and what of it is not as written."""


KINDS: dict[type, StepKind] = {
    steps.StartProcessGroup: StepKind(process_group.START, checks.process_group, fake_group),
    steps.Agree: StepKind(process_group.AGREE, checks.nothing, NOBODY),
    steps.BuildMesh: StepKind(process_group.MESH, checks.mesh, on_cpu),
    steps.ReleaseOptimizer: StepKind(optimizer.RELEASE, checks.nothing, as_written),
    steps.UpcastParameters: StepKind(model.UPCAST, checks.upcast, as_written),
    steps.MakeContiguous: StepKind(model.CONTIGUOUS, checks.contiguous, as_written),
    steps.MoveModel: StepKind(model.MOVE, checks.moved, not_moved),
    steps.AutocastForward: StepKind(model.AUTOCAST, checks.autocast, on_cpu),
    steps.ParallelizeModules: StepKind(tensor_parallel.PARALLELIZE, checks.parallelized, as_written),
    steps.CheckpointModules: StepKind(checkpointing.CHECKPOINT, forward_checks.checkpointed, as_written),
    steps.CompileModules: StepKind(compilation.COMPILE, forward_checks.compiled, as_written),
    steps.ShardUnits: StepKind(fsdp2.SHARD, checks.units, unpinned),
    steps.AverageGradients: StepKind(gradients.AVERAGE, fsdp_checks.averaged, as_written),
    steps.ConvertSyncBatchNorm: StepKind(sync_batch_norm.CONVERT, checks.batch_norms, as_written),
    steps.WrapFSDP1: StepKind(fsdp1.WRAP, checks.fsdp1_units, wrap_fsdp1),
    steps.RegroupOptimizer: StepKind(fsdp1.REGROUP, checks.regrouped, as_written),
    steps.WrapDDP: StepKind(ddp.WRAP, checks.ddp, wrap_ddp),
    steps.RebindOptimizer: StepKind(optimizer.REBIND, checks.rebound, as_written),
    steps.CreateOptimizer: StepKind(optimizer.CREATE, checks.created, as_written),
    steps.CreateGradScaler: StepKind(gradients.SCALER, checks.grad_scaler, on_cpu),
    steps.ShardLoader: StepKind(loaders.SHARD, checks.divided, NO_LOADERS),
    steps.WrapLoader: StepKind(loaders.WRAP, checks.wrapped, NO_LOADERS),
    steps.ConvertFP8Linears: StepKind(fp8.CONVERT, forward_checks.converted, where_torchao_is),
    steps.ConvertTransformerEngine: StepKind(transformer_engine.CONVERT, forward_checks.engine, NO_ENGINE),
    steps.AutocastFP8Forward: StepKind(transformer_engine.AUTOCAST, forward_checks.autocast, NO_ENGINE),
    steps.InitializeMSAMP: StepKind(fp8.MSAMP, forward_checks.msamp, skipped("MS-AMP runs on a GPU only")),
    steps.PrecomputeFloat8Scales: StepKind(fp8.SCALES, forward_checks.scales, where_torchao_is),
    steps.MoveToXLA: StepKind(xla.MOVE, checks.moved_to_xla, NO_XLA),
    steps.ReduceXLAGradients: StepKind(xla.REDUCE, checks.reduced_over_xla, NO_XLA),
    steps.CastForward: StepKind(deepspeed.CAST, checks.cast, as_written),
    steps.MarkLeafModules: StepKind(deepspeed.LEAVES, checks.leaves, as_written),
    steps.ConvertOptimizer: StepKind(deepspeed.CONVERT, checks.converted, not_compiled),
    steps.PartitionParameters: StepKind(deepspeed.PARTITION, checks.partitioned, partition_parameters),
    steps.InitializeDeepSpeed: StepKind(deepspeed.INITIALIZE, checks.initialised, initialize_deepspeed),
    steps.RegisterEntryPoints: StepKind(entry_points.REGISTER, checks.entry_points, as_written),
    steps.CheckFiles: StepKind(check_files.CHECK, checks.nothing, NO_VALUES),
    steps.AllocateTensors: StepKind(allocate.ALLOCATE, checks.allocated, NO_VALUES),
    steps.InitializeTensors: StepKind(init_weights.INITIALIZE, checks.nothing, NO_VALUES),
    steps.ReadTensors: StepKind(read_weights.READ, checks.nothing, NO_VALUES),
    steps.StashTensors: StepKind(stash.STASH, checks.nothing, NO_DATA),
    steps.SendTensors: StepKind(send_weights.SEND, checks.sent, NO_DATA),
}
"""Each kind of step: its handler, its verification, its rehearsal."""


def handlers() -> dict[type, Handler[Any, Target, Any]]:
    """The handlers alone, as ``interpret`` takes them."""
    return {step: kind.handler for step, kind in KINDS.items()}
