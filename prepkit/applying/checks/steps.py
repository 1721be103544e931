"""What each kind of step leaves behind, looked at after apply: one function per kind. Reads only.

What is looked at in one library only is in a file of its own beside this one (``fsdp1``, ``fsdp2``, ``fp8`` ...).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.nn import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

from prepkit.applying.checks import fsdp1, fsdp2
from prepkit.objects.forward import MARK, AutocastedForward, FP8Forward
from prepkit.objects.local_part import local
from prepkit.objects.state import LiveModel, actual_layout
from prepkit.plan.attestation import Check, each, same
from prepkit.ranks.world import world
from prepkit.steps import (
    AllocateTensors,
    AutocastForward,
    BuildMesh,
    ConvertSyncBatchNorm,
    CreateGradScaler,
    MakeContiguous,
    MoveModel,
    ParallelizeModules,
    SendTensors,
    ShardUnits,
    StartProcessGroup,
    Step,
    UpcastParameters,
    WrapDDP,
    WrapFSDP1,
)


def nothing(step: Step, live: LiveModel) -> Iterator[Check]:
    """Leaves nothing behind that could be looked at."""
    del step, live
    yield from ()


def process_group(step: StartProcessGroup, live: LiveModel) -> Iterator[Check]:
    """The default group runs, over as many ranks and with the backends that were planned."""
    del live
    ranks = world()
    yield same("StartProcessGroup", "default group", "running", "running" if ranks.running else "none")
    if ranks.running:
        served = {pair.rpartition(":")[2] for pair in ranks.backend.split(",")}
        wanted = {pair.rpartition(":")[2] for pair in step.backend.split(",")}
        bad = [] if "fake" in served else sorted(wanted - served)  # a fake group stands for any other
        yield same("StartProcessGroup", "world size", step.world_size, ranks.size)
        yield each("StartProcessGroup", "backend", [f"{name} is not served" for name in bad])


def mesh(step: BuildMesh, live: LiveModel) -> Iterator[Check]:
    """The target has the mesh: device, axes and their sizes."""
    mesh = live.target.mesh
    planned = (step.device, tuple((axis.name, axis.size) for axis in step.axes))
    found = mesh and (mesh.device_type, tuple(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)))
    yield same("BuildMesh", "device and axes", planned, found)


def upcast(step: UpcastParameters, live: LiveModel) -> Iterator[Check]:
    """Every parameter that was cast has its new dtype."""
    found = {name: actual_layout(live.params[name]).dtype for name in step.names if name in live.params}
    bad = [f"{name} is {dtype}" for name, dtype in found.items() if dtype != step.dtype]
    yield each("UpcastParameters", f"parameters are {step.dtype}", bad)


def contiguous(step: MakeContiguous, live: LiveModel) -> Iterator[Check]:
    """What this rank holds of every such parameter lies in order."""
    bad = [name for name in step.names if name in live.params and not local(live.params[name]).is_contiguous()]
    yield each("MakeContiguous", "elements lie in the order of their indices", bad)


def moved(step: MoveModel, live: LiveModel) -> Iterator[Check]:
    """Parameters and buffers are on a device of the planned type."""
    tensors = {**live.params, **live.buffers}
    bad = [f"{name} is on {t.device}" for name, t in tensors.items() if t.device.type != step.device.type]
    yield each("MoveModel", f"everything is on {step.device.type}", bad)


def autocast(step: AutocastForward, live: LiveModel) -> Iterator[Check]:
    """The root's forward runs under autocast of this device, with these dtypes."""
    own = live.modules[""][-1]
    forward = own.forward.forward if isinstance(own.forward, FP8Forward) else own.forward  # which is outside it
    if isinstance(forward, AutocastedForward) and hasattr(own, MARK):
        found = (
            forward.device,
            *(str(dtype).removeprefix("torch.") for dtype in (forward.dtype, forward.output_dtype)),
        )
        yield same("AutocastForward", "autocast forward", (step.device, step.dtype, step.output_dtype), found)
    else:
        yield each("AutocastForward", "autocast forward", [f"{type(own).__name__} has its own forward"])


def parallelized(step: ParallelizeModules, live: LiveModel) -> Iterator[Check]:
    """Every module has the hooks that lay out its input and output; how its weights lie is the layout's to say."""
    there = {path: stack[-1] for cut in step.styles for path in cut.paths if (stack := live.at(path))}
    bad = [path for path, own in there.items() if not (own._forward_pre_hooks and own._forward_hooks)]
    yield each("ParallelizeModules", "input and output are laid out", bad)


def units(step: ShardUnits, live: LiveModel) -> Iterator[Check]:
    """``fully_shard`` was called on the planned modules and on no others, and each unit works as planned."""
    found = live.units
    planned = {unit.path for unit in step.units}
    bad = [f"{path or 'the root'} is none" for path in sorted(planned - set(found))]
    bad += [f"{path or 'the root'} was not planned" for path in found if path not in planned]
    yield each("ShardUnits", "units", bad)
    yield from fsdp2.checks(step, live)


def batch_norms(step: ConvertSyncBatchNorm, live: LiveModel) -> Iterator[Check]:
    """At every planned path a ``SyncBatchNorm`` stands."""
    bad = [path for path in step.paths if not any(isinstance(m, SyncBatchNorm) for m in live.at(path))]
    yield each("ConvertSyncBatchNorm", "synchronised", bad)


def grad_scaler(step: CreateGradScaler, live: LiveModel) -> Iterator[Check]:
    """The target has an enabled scaler with the planned scale."""
    scaler = live.target.scaler
    found = scaler.get_scale() if scaler is not None and scaler.is_enabled() else None
    yield same("CreateGradScaler", "scale of an enabled scaler", step.init_scale, found)


def fsdp1_units(step: WrapFSDP1, live: LiveModel) -> Iterator[Check]:
    """FSDP1 wrappers stand where they were planned, and optimizer state lies as its parameter does."""
    yield each("WrapFSDP1", "units", fsdp1.wrong_units(step, live))
    yield each("WrapFSDP1", "state lies as its parameter does", fsdp1.wrong_states(live))
    if step.allocates:
        yield each("WrapFSDP1", "everything that was on meta has values", sorted(live.target.unfilled))


def ddp(step: WrapDDP, live: LiveModel) -> Iterator[Check]:
    """The model is wrapped in DDP with the planned options."""
    model = live.target.model
    if not isinstance(model, DistributedDataParallel):
        found = f"the model is a {type(model).__name__}"
        yield Check(subject="WrapDDP", what="wrapped", holds=False, detail=found)
        return
    yield Check(subject="WrapDDP", what="wrapped", holds=True)
    for name in ("broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph"):
        yield same("WrapDDP", name, getattr(step, name), getattr(model, name))
    yield same("WrapDDP", "bytes of a bucket", int(step.bucket_cap_mb * 2**20), model.bucket_bytes_cap)
    yield same("WrapDDP", "communication hooks", int(step.hook is not None), len(model._comm_hooks))


def allocated(step: AllocateTensors, live: LiveModel) -> Iterator[Check]:
    """What got storage got values too: memory that nobody wrote looks like any other (pain 17)."""
    del step
    yield each("AllocateTensors", "everything that was on meta has values", sorted(live.target.unfilled))


def sent(step: SendTensors, live: LiveModel) -> Iterator[Check]:
    """What waits to be sent is a model that rank 0 holds twice, and somebody else has no values of."""
    del step
    yield each("SendTensors", "all that was set aside is sent", sorted(live.target.stashed))
