"""The kinds of steps, one row each: how a step is done, how its outcome is verified, and what a rehearsal runs for it.

A new kind of step gets a row in ``KINDS``. Handlers, which are below, read their step and the target and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any, TypeVar

from attrs import evolve, frozen

from prepkit import steps
from prepkit.facts.run import Departure
from prepkit.interpreter import Handler
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
    from prepkit.applying.handlers.ddp import can_send_nothing

    if not can_send_nothing():
        return None, "DDP sends values, unless it is that of torch 2.7 or newer, and a meta copy has none"
    low = step.hook is not None and "bf16" in f"{step.hook.hook} {step.hook.wrapper}"
    why = "a meta copy has no values to send" + (", and no NCCL for bfloat16" if low else "")
    return evolve(step, device=None, hook=None if low else step.hook), why


def where_torchao_is(step: ConvertFP8Linears | PrecomputeFloat8Scales) -> Substitute:
    """Torchao's float8 can be had on the CPU, if it is installed."""
    from prepkit.applying.handlers.swap_layers import library_problems

    return (None, "torchao is not installed here") if library_problems("torchao.float8", "torchao") else (step, "")


def not_compiled(step: ConvertOptimizer) -> Substitute:
    """The optimizer stays as it is."""
    return None, f"{step.algorithm} would have to be compiled; the optimizer stands in for it"


def partition_parameters(step: PartitionParameters) -> Substitute:
    """The step itself on the CPU, for zeros that stand in for the parameters."""
    from prepkit.objects.deepspeed import rehearsable

    small = rehearsable(step.settings)
    return evolve(step, device=LocalDevice(type="cpu"), settings=small), "zeros on the CPU are divided"


def initialize_deepspeed(step: InitializeDeepSpeed) -> Substitute:
    """DeepSpeed on the CPU, with buckets that fit a laptop."""
    from prepkit.objects.deepspeed import rehearsable_settings

    return (None, "MS-AMP runs on a GPU only") if step.library == "msamp" else rehearsable_settings(step)


NO_VALUES = skipped("a meta copy has no values, and gets none")
NO_DATA = skipped("a meta copy carries no data, so there is nothing to set aside or to send")
NOBODY = skipped("the fake group carries no data, so there is nobody to ask")
NO_LOADERS = skipped("loaders are not copied")
NO_ENGINE = skipped("TransformerEngine runs on a GPU only")
NO_XLA = skipped("torch_xla has no device without data")


@frozen(eq=False, repr=False)
class StepKind:
    """What ``apply`` and ``rehearse`` know of one kind of step."""

    handled_by: str
    """Module and name of its handler in ``applying.handlers``, imported once a plan has such a step."""
    checked_by: str
    """Likewise in ``applying.checks``: what looks at what the step has left; ``nothing`` where that cannot be seen."""
    rehearse: Callable[[Any], Substitute]
    """The step that a rehearsal runs in its place, if any, and what of it is not as written."""

    @property
    def handler(self) -> Handler[Any, Target, Any]:
        """Says whether the step can be done, does it, and undoes it."""
        found: Handler[Any, Target, Any] = _member("handlers", self.handled_by)
        return found

    def verify(self, step: Any, live: LiveModel) -> Iterator[Departure]:
        """Where what stands there is not what the step is to leave."""
        found: Iterator[Departure] = _member("checks", self.checked_by)(step, live)
        return found


def _member(room: str, place: str) -> Any:
    module, _, name = place.partition(".")
    return getattr(import_module(f"prepkit.applying.{room}.{module}"), name)


KINDS: dict[type, StepKind] = {
    steps.StartProcessGroup: StepKind("process_group.START", "steps.process_group", fake_group),
    steps.Agree: StepKind("process_group.AGREE", "steps.nothing", NOBODY),
    steps.BuildMesh: StepKind("process_group.MESH", "steps.mesh", on_cpu),
    steps.ReleaseOptimizer: StepKind("optimizer.RELEASE", "steps.nothing", as_written),
    steps.UpcastParameters: StepKind("model.UPCAST", "steps.upcast", as_written),
    steps.MakeContiguous: StepKind("model.CONTIGUOUS", "steps.contiguous", as_written),
    steps.MoveModel: StepKind("model.MOVE", "steps.moved", not_moved),
    steps.AutocastForward: StepKind("model.AUTOCAST", "steps.autocast", on_cpu),
    steps.ParallelizeModules: StepKind("tensor_parallel.PARALLELIZE", "steps.parallelized", as_written),
    steps.CheckpointModules: StepKind("checkpointing.CHECKPOINT", "forward.checkpointed", as_written),
    steps.CompileModules: StepKind("compilation.COMPILE", "forward.compiled", as_written),
    steps.ShardUnits: StepKind("fsdp2.SHARD", "steps.units", unpinned),
    steps.AverageGradients: StepKind("gradients.AVERAGE", "fsdp.averaged", as_written),
    steps.ConvertSyncBatchNorm: StepKind("sync_batch_norm.CONVERT", "steps.batch_norms", as_written),
    steps.WrapFSDP1: StepKind("fsdp1.WRAP", "steps.fsdp1_units", wrap_fsdp1),
    steps.RegroupOptimizer: StepKind("fsdp1.REGROUP", "steps.regrouped", as_written),
    steps.WrapDDP: StepKind("ddp.WRAP", "steps.ddp", wrap_ddp),
    steps.RebindOptimizer: StepKind("optimizer.REBIND", "steps.rebound", as_written),
    steps.CreateOptimizer: StepKind("optimizer.CREATE", "steps.created", as_written),
    steps.CreateGradScaler: StepKind("gradients.SCALER", "steps.grad_scaler", on_cpu),
    steps.ShardLoader: StepKind("loaders.SHARD", "loaders.divided", NO_LOADERS),
    steps.WrapLoader: StepKind("loaders.WRAP", "loaders.wrapped", NO_LOADERS),
    steps.ConvertFP8Linears: StepKind("fp8.CONVERT", "forward.converted", where_torchao_is),
    steps.ConvertTransformerEngine: StepKind("transformer_engine.CONVERT", "forward.engine", NO_ENGINE),
    steps.AutocastFP8Forward: StepKind("transformer_engine.AUTOCAST", "forward.autocast", NO_ENGINE),
    steps.InitializeMSAMP: StepKind("fp8.MSAMP", "forward.msamp", skipped("MS-AMP runs on a GPU only")),
    steps.PrecomputeFloat8Scales: StepKind("fp8.SCALES", "forward.scales", where_torchao_is),
    steps.MoveToXLA: StepKind("xla.MOVE", "steps.moved_to_xla", NO_XLA),
    steps.ReduceXLAGradients: StepKind("xla.REDUCE", "steps.reduced_over_xla", NO_XLA),
    steps.CastForward: StepKind("deepspeed.CAST", "steps.cast", as_written),
    steps.MarkLeafModules: StepKind("deepspeed.LEAVES", "steps.leaves", as_written),
    steps.ConvertOptimizer: StepKind("deepspeed.CONVERT", "steps.converted", not_compiled),
    steps.PartitionParameters: StepKind("deepspeed.PARTITION", "steps.partitioned", partition_parameters),
    steps.InitializeDeepSpeed: StepKind("deepspeed.INITIALIZE", "steps.initialised", initialize_deepspeed),
    steps.RegisterEntryPoints: StepKind("entry_points.REGISTER", "steps.entry_points", as_written),
    steps.CheckFiles: StepKind("check_files.CHECK", "steps.nothing", NO_VALUES),
    steps.AllocateTensors: StepKind("allocate.ALLOCATE", "steps.allocated", NO_VALUES),
    steps.InitializeTensors: StepKind("init_weights.INITIALIZE", "steps.nothing", NO_VALUES),
    steps.ReadTensors: StepKind("read_weights.READ", "steps.nothing", NO_VALUES),
    steps.StashTensors: StepKind("stash.STASH", "steps.nothing", NO_DATA),
    steps.SendTensors: StepKind("send_weights.SEND", "steps.sent", NO_DATA),
}
"""Each kind of step: its handler, its verification, its rehearsal."""


def handlers(kinds: Iterable[type] = KINDS) -> dict[type, Handler[Any, Target, Any]]:
    """The handlers of these kinds alone, as ``interpret`` takes them."""
    return {kind: KINDS[kind].handler for kind in kinds}
