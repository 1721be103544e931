"""What a rehearsal runs in the place of a step: the step itself, one that needs no device and no data, or nothing.

One function per kind of step that is not rehearsed as written; ``kinds.KINDS`` says which is whose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from attrs import evolve

from prepkit.live.handlers.ddp import can_send_nothing
from prepkit.live.handlers.swap_layers import library_problems
from prepkit.live.model.deepspeed import rehearsable, rehearsable_settings
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
    """What is on meta stays there."""
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
