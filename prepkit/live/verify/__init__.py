"""After apply: does what stands there match the plan? Looks at every parameter, every step and every optimizer slot.

Reads only, a few microseconds per parameter; and, where asked to, every buffer's bytes once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.nn import Module, SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from prepkit.live.model.forward import MARK, AutocastedForward
from prepkit.live.model.forward_fp8 import FP8Forward
from prepkit.live.model.names import known_bases
from prepkit.live.model.state import LiveModel, found_form, look
from prepkit.live.model.target import Target
from prepkit.live.verify import buffers, deepspeed, fp8, fsdp1, fsdp2, model, optimizer
from prepkit.plan import Plan
from prepkit.plan.attestation import Attestation, Check
from prepkit.plan.attestation import each as _each
from prepkit.plan.attestation import same as _same
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

__all__ = ["VERIFIERS", "Attestation", "Check", "verify"]


@torch.no_grad()
def verify(
    plan: Plan, target: Target, *, allow_meta: bool = False, before: Mapping[str, str] | None = None
) -> Attestation:
    """Compares the target with what the plan predicts for this rank.

    Never raises on a difference: it is a failed check. ``allow_meta`` is for rehearsals, where nothing has data.
    ``before`` holds the ``buffers.fingerprints`` from before the first step: then their values are compared as well,
    with those and over the ranks, in one small collective that every rank has to take part in.
    """
    standing = look(target)
    rank = dist.get_rank() if dist.is_initialized() else 0
    return Attestation(
        rank=rank,
        checks=(
            *model.checks(plan, standing, rank),
            *(() if allow_meta else model.meta(standing)),
            *(() if before is None else buffers.checks(plan, standing, rank, before)),
            *(check for planned in plan.steps for check in VERIFIERS[type(planned.step)](planned.step, standing)),
        ),
    )


# --- one function per step kind ------------------------------------------------------------------------------------


def _nothing(step: Step, standing: LiveModel) -> Iterator[Check]:
    """Leaves nothing behind that could be looked at."""
    del step, standing
    yield from ()


def _group(step: StartProcessGroup, standing: LiveModel) -> Iterator[Check]:
    del standing
    runs = dist.is_initialized()
    yield _same("StartProcessGroup", "default group", "running", "running" if runs else "none")
    if runs:
        served = {pair.rpartition(":")[2] for pair in str(dist.get_backend_config()).split(",")}
        wanted = {pair.rpartition(":")[2] for pair in step.backend.split(",")}
        bad = [] if "fake" in served else sorted(wanted - served)  # a fake group stands for any other
        yield _same("StartProcessGroup", "world size", step.world_size, dist.get_world_size())
        yield _each("StartProcessGroup", "backend", [f"{name} is not served" for name in bad])


def _mesh(step: BuildMesh, standing: LiveModel) -> Iterator[Check]:
    mesh = standing.target.mesh
    planned = (step.device, tuple((axis.name, axis.size) for axis in step.axes))
    found = mesh and (mesh.device_type, tuple(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)))
    yield _same("BuildMesh", "device and axes", planned, found)


def _dtypes(step: UpcastParameters, standing: LiveModel) -> Iterator[Check]:
    found = {name: found_form(standing.params[name]).dtype for name in step.names if name in standing.params}
    bad = [f"{name} is {dtype}" for name, dtype in found.items() if dtype != step.dtype]
    yield _each("UpcastParameters", f"parameters are {step.dtype}", bad)


def _device(step: MoveModel, standing: LiveModel) -> Iterator[Check]:
    tensors = {**standing.params, **standing.buffers}
    bad = [f"{name} is on {t.device}" for name, t in tensors.items() if t.device.type != step.device.type]
    yield _each("MoveModel", f"everything is on {step.device.type}", bad)


def _autocast(step: AutocastForward, standing: LiveModel) -> Iterator[Check]:
    own = standing.modules[""][-1]
    forward = own.forward.forward if isinstance(own.forward, FP8Forward) else own.forward  # which is outside it
    if isinstance(forward, AutocastedForward) and hasattr(own, MARK):
        found = (
            forward.device,
            *(str(dtype).removeprefix("torch.") for dtype in (forward.dtype, forward.output_dtype)),
        )
        yield _same("AutocastForward", "autocast forward", (step.device, step.dtype, step.output_dtype), found)
    else:
        yield _each("AutocastForward", "autocast forward", [f"{type(own).__name__} has its own forward"])


def _parallel(step: ParallelizeModules, standing: LiveModel) -> Iterator[Check]:
    """Every module has the hooks that lay out its input and output; how its weights lie is the layout's to say."""
    there = {path: stack[-1] for cut in step.styles for path in cut.paths if (stack := standing.at(path))}
    bad = [path for path, own in there.items() if not (own._forward_pre_hooks and own._forward_hooks)]
    yield _each("ParallelizeModules", "input and output are laid out", bad)


def _checkpointed(step: CheckpointModules, standing: LiveModel) -> Iterator[Check]:
    bad = [path for path in step.paths if not any(isinstance(m, CheckpointWrapper) for m in standing.at(path))]
    yield _each("CheckpointModules", "wrapped", bad)


def _compiled(step: CompileModules, standing: LiveModel) -> Iterator[Check]:
    bad = [path or "the model" for path in step.paths if not any(map(_runs_compiled, standing.at(path)))]
    yield _each("CompileModules", "compiled code is bound", bad)


def _runs_compiled(module: Module) -> bool:
    """Whether a call of the module runs what was compiled from this very module, and not from a twin."""
    if "DeepSpeedEngine" in known_bases(type(module)):
        return bool(getattr(module, "is_compiled", False))  # it compiles the module inside
    compiled = module._compiled_call_impl
    source = getattr(compiled, "_torchdynamo_orig_callable", None)  # torch's wrapper names what it was made from
    return compiled is not None and getattr(source, "__self__", module) is module


def _units(step: ShardUnits, standing: LiveModel) -> Iterator[Check]:
    found = standing.units
    planned = {unit.path for unit in step.units}
    bad = [f"{path or 'the root'} is none" for path in sorted(planned - set(found))]
    bad += [f"{path or 'the root'} was not planned" for path in found if path not in planned]
    yield _each("ShardUnits", "units", bad)
    yield from fsdp2.checks(step, standing)


def _batch_norms(step: ConvertSyncBatchNorm, standing: LiveModel) -> Iterator[Check]:
    bad = [path for path in step.paths if not any(isinstance(m, SyncBatchNorm) for m in standing.at(path))]
    yield _each("ConvertSyncBatchNorm", "synchronised", bad)


def _scaler(step: CreateGradScaler, standing: LiveModel) -> Iterator[Check]:
    scaler = standing.target.scaler
    found = scaler.get_scale() if scaler is not None and scaler.is_enabled() else None
    yield _same("CreateGradScaler", "scale of an enabled scaler", step.init_scale, found)


def _fsdp1(step: WrapFSDP1, standing: LiveModel) -> Iterator[Check]:
    yield _each("WrapFSDP1", "units", fsdp1.wrong_units(step, standing))
    yield _each("WrapFSDP1", "state lies as its parameter does", fsdp1.wrong_states(standing))


def _ddp(step: WrapDDP, standing: LiveModel) -> Iterator[Check]:
    model = standing.target.model
    if not isinstance(model, DistributedDataParallel):
        found = f"the model is a {type(model).__name__}"
        yield Check(subject="WrapDDP", what="wrapped", holds=False, detail=found)
        return
    yield Check(subject="WrapDDP", what="wrapped", holds=True)
    for name in ("broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph"):
        yield _same("WrapDDP", name, getattr(step, name), getattr(model, name))
    yield _same("WrapDDP", "bytes of a bucket", int(step.bucket_cap_mb * 2**20), model.bucket_bytes_cap)
    yield _same("WrapDDP", "communication hooks", int(step.hook is not None), len(model._comm_hooks))


def _loader(step: ShardLoader, standing: LiveModel) -> Iterator[Check]:
    sampler = standing.target.loaders[step.index].sampler
    yield _same("ShardLoader", f"sampler of loader {step.index}", "DistributedSampler", type(sampler).__name__)
    if isinstance(sampler, DistributedSampler):
        wanted = (*_reader(step, standing), step.shuffle, step.seed, step.drop_last)
        found = (sampler.num_replicas, sampler.rank, sampler.shuffle, sampler.seed, sampler.drop_last)
        yield _same("ShardLoader", "parts, part, shuffle, seed, drop_last", wanted, found)


def _reader(step: ShardLoader, standing: LiveModel) -> tuple[int, int]:
    """Number of parts of the data, and this rank's: ranks that differ only in other axes than the step's share one."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    mesh = standing.target.mesh
    if step.axes is None or mesh is None:
        return world, rank
    sizes = [mesh[axis].size() for axis in step.axes]
    places = [mesh.get_local_rank(axis) for axis in step.axes]
    return prod(sizes), sum(place * prod(sizes[at + 1 :]) for at, place in enumerate(places))


def _looked(look: Callable[[Any, LiveModel], Iterator[tuple[str, list[str]]]]) -> Callable[..., Iterator[Check]]:
    """Checks of a step out of what was looked at."""
    return lambda step, standing: (_each(type(step).__name__, what, bad) for what, bad in look(step, standing))


def _filled(step: AllocateTensors, standing: LiveModel) -> Iterator[Check]:
    """What got storage got values too: memory that nobody wrote looks like any other (pain 17)."""
    del step
    yield _each("AllocateTensors", "everything that was on meta has values", sorted(standing.target.unfilled))


def _sent(step: SendTensors, standing: LiveModel) -> Iterator[Check]:
    """What waits to be sent is a model that rank 0 holds twice, and somebody else has no values of."""
    del step
    yield _each("SendTensors", "all that was set aside is sent", sorted(standing.target.aside))


VERIFIERS: dict[type[Any], Callable[[Any, LiveModel], Iterator[Check]]] = {
    StartProcessGroup: _group,
    Agree: _nothing,
    BuildMesh: _mesh,
    ReleaseOptimizer: _nothing,
    UpcastParameters: _dtypes,
    MoveModel: _device,
    AutocastForward: _autocast,
    ParallelizeModules: _parallel,
    CheckpointModules: _checkpointed,
    CompileModules: _compiled,
    ShardUnits: _units,
    ConvertSyncBatchNorm: _batch_norms,
    WrapFSDP1: _fsdp1,
    RegroupOptimizer: optimizer.regrouped,
    WrapDDP: _ddp,
    RebindOptimizer: optimizer.rebound,
    CreateOptimizer: optimizer.created,
    CreateGradScaler: _scaler,
    ShardLoader: _loader,
    ConvertFP8Linears: _looked(fp8.converted),
    ConvertTransformerEngine: _looked(fp8.engine),
    AutocastFP8Forward: _looked(fp8.autocast),
    InitializeMSAMP: _looked(fp8.msamp),
    PrecomputeFloat8Scales: _looked(fp8.scales),
    MoveToXLA: _looked(fp8.on_xla),
    ReduceXLAGradients: _looked(fp8.reduced),
    CastForward: deepspeed.cast,
    MarkLeafModules: deepspeed.leaves,
    ConvertOptimizer: deepspeed.converted,
    InitializeDeepSpeed: deepspeed.initialised,
    CheckFiles: _nothing,
    AllocateTensors: _filled,
    InitializeTensors: _nothing,
    ReadTensors: _nothing,
    StashTensors: _nothing,
    SendTensors: _sent,
}
"""Step kind to the function that looks at what the step left behind."""
