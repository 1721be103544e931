"""Which steps of a plan can be rehearsed, and what of them is not as written."""

from __future__ import annotations

from typing import assert_never

from attrs import evolve, frozen

from prepkit.live.handlers import ddp
from prepkit.live.handlers.swap_layers import library_problems
from prepkit.live.model import deepspeed
from prepkit.plan import Plan, Planned
from prepkit.plan.layout import ParamLayout
from prepkit.steps import (
    Agree,
    AllocateTensors,
    AutocastForward,
    AutocastFP8Forward,
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
    LocalDevice,
    MarkLeafModules,
    MoveModel,
    MoveToXLA,
    ParallelizeModules,
    PrecomputeFloat8Scales,
    ReadTensors,
    RebindOptimizer,
    ReduceXLAGradients,
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
)


@frozen(kw_only=True)
class Skipped:
    """A step of the plan that a rehearsal cannot run, or does not run as written."""

    index: int
    """Position among the plan's steps, from 0; -1: the optimizer, which is no step."""
    step: str
    """Step kind."""
    why: str

    def __str__(self) -> str:
        return f"not rehearsed: {self.step}: {self.why}"


def staging(plan: Plan) -> tuple[Plan, tuple[Skipped, ...]]:
    """The plan as far as it can be rehearsed, and what of it cannot."""
    kept: list[Planned] = []
    omitted: list[Skipped] = []
    for index, planned in enumerate(plan.steps):
        step, why = _staged(planned.step)
        if why:
            omitted.append(Skipped(index=index, step=type(planned.step).__name__, why=why))
        if step is not None:
            kept.append(evolve(planned, step=step))
    scaled = any(one.step == InitializeMSAMP.__name__ for one in omitted)
    # Packed weights lose their class on meta, where there are no bytes to unpack.
    layout = (
        one if one.cls == "DTensor" else evolve(one, cls="Parameter")
        for one in (_unscaled(plan) if scaled else plan.layout)
    )
    return evolve(plan, steps=tuple(kept), layout=tuple(layout)), tuple(omitted)


def _unscaled(plan: Plan) -> tuple[ParamLayout, ...]:
    """The layout as it is before MS-AMP, whose step is not rehearsed."""
    upcast = {name for one in plan.steps if isinstance(one.step, UpcastParameters) for name in one.step.names}
    stored = {p.name: "float32" if p.name in upcast else p.dtype for p in plan.facts.model.params}
    return tuple(
        evolve(one, cls="Parameter", dtype=stored[one.name]) if one.cls == "ScalingParameter" else one
        for one in plan.layout
    )


def _staged(step: Step) -> tuple[Step | None, str]:  # noqa: C901  # one case per kind
    """The step as it is rehearsed, if it is, and what is not as written, if anything."""
    match step:
        case StartProcessGroup(backend=backend, world_size=world):
            return None, f"a fake group of {world} ranks stands in for {backend}"
        case Agree():
            return None, "the fake group carries no data, so there is nobody to ask"
        case MoveModel(device=device):
            return None, f"a meta copy has no data to move to {device.type}"
        case CheckFiles() | AllocateTensors() | InitializeTensors() | ReadTensors():
            return None, "a meta copy has no values, and gets none"
        case StashTensors() | SendTensors():
            return None, "a meta copy carries no data, so there is nothing to set aside or to send"
        case WrapDDP() if not ddp.can_send_nothing():
            return None, "DDP sends values, unless it is that of torch 2.7 or newer, and a meta copy has none"
        case WrapDDP(hook=hook):
            low = hook is not None and "bf16" in f"{hook.hook} {hook.wrapper}"
            staged = evolve(step, device=None, hook=None if low else hook)
            return staged, "a meta copy has no values to send" + (", and no NCCL for bfloat16" if low else "")
        case ShardLoader():
            return None, "loaders are not copied"
        case ConvertFP8Linears() | PrecomputeFloat8Scales() if library_problems("torchao.float8", "torchao"):
            return None, "torchao is not installed here"
        case ConvertTransformerEngine() | AutocastFP8Forward():
            return None, "TransformerEngine runs on a GPU only"
        case InitializeMSAMP():
            return None, "MS-AMP runs on a GPU only"
        case MoveToXLA() | ReduceXLAGradients():
            return None, "torch_xla has no device without data"
        case BuildMesh(device=device) | AutocastForward(device=device) | CreateGradScaler(device=device) if (
            device != "cpu"
        ):
            return evolve(step, device="cpu"), f"the CPU stands in for {device}"
        case WrapFSDP1(device=device) if device.type != "cpu" or step.sync_module_states:
            flat = evolve(step, device=LocalDevice(type="cpu"), sync_module_states=False)
            return flat, f"the CPU stands in for {device.type}, and nothing is broadcast"
        case ShardUnits(pin_memory=True):
            return evolve(step, pin_memory=False), "there is no data whose memory could be pinned"
        case (
            BuildMesh()
            | AutocastForward()
            | ShardUnits()
            | WrapFSDP1()
            | RegroupOptimizer()
            | ReleaseOptimizer()
            | UpcastParameters()
            | ParallelizeModules()
            | CheckpointModules()
            | CompileModules()
            | RebindOptimizer()
            | CreateOptimizer()
            | CastForward()
            | MarkLeafModules()
            | CreateGradScaler()
            | ConvertSyncBatchNorm()
            | ConvertFP8Linears()
            | PrecomputeFloat8Scales()
        ):
            return step, ""
        case ConvertOptimizer(algorithm=algorithm):
            return None, f"{algorithm} would have to be compiled; the optimizer stands in for it"
        case InitializeDeepSpeed(library="msamp"):
            return None, "MS-AMP runs on a GPU only"
        case InitializeDeepSpeed():
            return deepspeed.staged(step)
        case _:
            assert_never(step)
