"""What each kind of step leaves behind, looked at after apply: one function per kind. Reads only.

What is looked at in one library only is in a file of its own beside this one (``fsdp1``, ``fsdp2``, ``fp8`` ...).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import evolve
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

from prepkit.applying.checks import fsdp
from prepkit.facts.run import Departure, each, same
from prepkit.objects import fsdp1_flat
from prepkit.objects.deepspeed import initialised as compared
from prepkit.objects.entry_point import ThroughWrapper, like_forward
from prepkit.objects.forward import MARK, AutocastedForward, CastedForward, FP8Forward
from prepkit.objects.joint_optimizer import members
from prepkit.objects.local_part import local
from prepkit.objects.state import LiveModel, actual_layout
from prepkit.ranks.world import world
from prepkit.steps import (
    AllocateTensors,
    AutocastForward,
    BuildMesh,
    CastForward,
    ConvertOptimizer,
    ConvertSyncBatchNorm,
    CreateGradScaler,
    CreateOptimizer,
    InitializeDeepSpeed,
    MakeContiguous,
    MarkLeafModules,
    MoveModel,
    MoveToXLA,
    ParallelizeModules,
    PartitionParameters,
    RebindOptimizer,
    ReduceXLAGradients,
    RegisterEntryPoints,
    RegroupOptimizer,
    SendTensors,
    ShardUnits,
    StartProcessGroup,
    Step,
    UpcastParameters,
    WrapDDP,
    WrapFSDP1,
)


def nothing(step: Step, live: LiveModel) -> Iterator[Departure]:
    """Leaves nothing behind that could be looked at."""
    del step, live
    yield from ()


def process_group(step: StartProcessGroup, live: LiveModel) -> Iterator[Departure]:
    """The default group runs, over as many ranks and with the backends that were planned."""
    del live
    ranks = world()
    yield from same("StartProcessGroup", "default group", "running", "running" if ranks.running else "none")
    if ranks.running:
        served = {pair.rpartition(":")[2] for pair in ranks.backend.split(",")}
        wanted = {pair.rpartition(":")[2] for pair in step.backend.split(",")}
        bad = [] if "fake" in served else sorted(wanted - served)  # a fake group stands for any other
        yield from same("StartProcessGroup", "world size", step.world_size, ranks.size)
        yield from each("StartProcessGroup", "backend", [f"{name} is not served" for name in bad])


def mesh(step: BuildMesh, live: LiveModel) -> Iterator[Departure]:
    """The target has the mesh: device, axes and their sizes."""
    mesh = live.target.mesh
    planned = (step.device, tuple((axis.name, axis.size) for axis in step.axes))
    found = mesh and (mesh.device_type, tuple(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)))
    yield from same("BuildMesh", "device and axes", planned, found)


def upcast(step: UpcastParameters, live: LiveModel) -> Iterator[Departure]:
    """Every parameter that was cast has its new dtype."""
    found = {name: actual_layout(live.params[name]).dtype for name in step.names if name in live.params}
    bad = [f"{name} is {dtype}" for name, dtype in found.items() if dtype != step.dtype]
    yield from each("UpcastParameters", f"parameters are {step.dtype}", bad)


def contiguous(step: MakeContiguous, live: LiveModel) -> Iterator[Departure]:
    """Yield what this rank holds of every such parameter lies in order."""
    bad = [name for name in step.names if name in live.params and not local(live.params[name]).is_contiguous()]
    yield from each("MakeContiguous", "elements lie in the order of their indices", bad)


def moved(step: MoveModel, live: LiveModel) -> Iterator[Departure]:
    """Parameters and buffers are on a device of the planned type."""
    tensors = {**live.params, **live.buffers}
    bad = [f"{name} is on {t.device}" for name, t in tensors.items() if t.device.type != step.device.type]
    yield from each("MoveModel", f"everything is on {step.device.type}", bad)


def autocast(step: AutocastForward, live: LiveModel) -> Iterator[Departure]:
    """The root's forward runs under autocast of this device, with these dtypes."""
    own = live.modules[""][-1]
    forward = own.forward.forward if isinstance(own.forward, FP8Forward) else own.forward  # which is outside it
    if isinstance(forward, AutocastedForward) and hasattr(own, MARK):
        found = (
            forward.device,
            *(str(dtype).removeprefix("torch.") for dtype in (forward.dtype, forward.output_dtype)),
        )
        yield from same("AutocastForward", "autocast forward", (step.device, step.dtype, step.output_dtype), found)
    else:
        yield from each("AutocastForward", "autocast forward", [f"{type(own).__name__} has its own forward"])


def parallelized(step: ParallelizeModules, live: LiveModel) -> Iterator[Departure]:
    """Every module has the hooks that lay out its input and output; how its weights lie is the layout's to say."""
    there = {path: stack[-1] for cut in step.styles for path in cut.paths if (stack := live.at(path))}
    bad = [path for path, own in there.items() if not (own._forward_pre_hooks and own._forward_hooks)]
    yield from each("ParallelizeModules", "input and output are laid out", bad)


def units(step: ShardUnits, live: LiveModel) -> Iterator[Departure]:
    """``fully_shard`` was called on the planned modules and on no others, and each unit works as planned."""
    found = live.units
    planned = {unit.path for unit in step.units}
    bad = [f"{path or 'the root'} is none" for path in sorted(planned - set(found))]
    bad += [f"{path or 'the root'} was not planned" for path in found if path not in planned]
    yield from each("ShardUnits", "units", bad)
    yield from fsdp.checks(step, live)


def batch_norms(step: ConvertSyncBatchNorm, live: LiveModel) -> Iterator[Departure]:
    """At every planned path a ``SyncBatchNorm`` stands."""
    bad = [path for path in step.paths if not any(isinstance(m, SyncBatchNorm) for m in live.at(path))]
    yield from each("ConvertSyncBatchNorm", "synchronised", bad)


def grad_scaler(step: CreateGradScaler, live: LiveModel) -> Iterator[Departure]:
    """The target has an enabled scaler with the planned scale."""
    scaler = live.target.scaler
    found = scaler.get_scale() if scaler is not None and scaler.is_enabled() else None
    yield from same("CreateGradScaler", "scale of an enabled scaler", step.init_scale, found)


def fsdp1_units(step: WrapFSDP1, live: LiveModel) -> Iterator[Departure]:
    """FSDP1 wrappers stand where they were planned, and optimizer state lies as its parameter does."""
    yield from each("WrapFSDP1", "units", fsdp.wrong_units(step, live))
    yield from each("WrapFSDP1", "state lies as its parameter does", fsdp.wrong_states(live))
    if step.allocates:
        yield from each("WrapFSDP1", "everything that was on meta has values", sorted(live.target.unfilled))


def ddp(step: WrapDDP, live: LiveModel) -> Iterator[Departure]:
    """The model is wrapped in DDP with the planned options."""
    model = live.target.model
    if not isinstance(model, DistributedDataParallel):
        yield Departure("WrapDDP", f"wrapped: the model is a {type(model).__name__}")
        return
    for name in ("broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph"):
        yield from same("WrapDDP", name, getattr(step, name), getattr(model, name))
    yield from same("WrapDDP", "bytes of a bucket", int(step.bucket_cap_mb * 2**20), model.bucket_bytes_cap)
    yield from same("WrapDDP", "communication hooks", int(step.hook is not None), len(model._comm_hooks))


def allocated(step: AllocateTensors, live: LiveModel) -> Iterator[Departure]:
    """Yield what got storage got values too: memory that nobody wrote looks like any other (pain 17)."""
    del step
    yield from each("AllocateTensors", "everything that was on meta has values", sorted(live.target.unfilled))


def sent(step: SendTensors, live: LiveModel) -> Iterator[Departure]:
    """Yield what waits to be sent is a model that rank 0 holds twice, and somebody else has no values of."""
    del step
    yield from each("SendTensors", "all that was set aside is sent", sorted(live.target.stashed))


def moved_to_xla(step: MoveToXLA, live: LiveModel) -> Iterator[Departure]:
    """Every tensor is on an XLA device."""
    del step
    tensors = {**live.params, **live.buffers}
    elsewhere = [f"{name} is on {tensor.device}" for name, tensor in tensors.items() if tensor.device.type != "xla"]
    yield from each("MoveToXLA", "everything is on xla", elsewhere)


def reduced_over_xla(step: ReduceXLAGradients, live: LiveModel) -> Iterator[Departure]:
    """A hook of the optimizer averages the gradients before each step."""
    from prepkit.objects.xla_gradients import XLAGradients

    del step
    hooks = getattr(live.target.optimizer, "_optimizer_step_pre_hooks", None)
    whole = live.target.whole_gradients
    bad = [] if hooks else ["the optimizer has no pre-step hook"]
    if not isinstance(whole, XLAGradients) or whole.optimizer is not live.target.optimizer:
        bad.append("nobody averages what is clipped")
    yield from each("ReduceXLAGradients", "gradients are averaged before each step", bad)


def entry_points(step: RegisterEntryPoints, live: LiveModel) -> Iterator[Departure]:
    """Each method stands in the instance of the outermost module, and goes the planned way."""
    outer, inner = live.target.model, live.modules[""][-1]
    ways = {
        "units": lambda call: isinstance(outer, FSDPModule) and getattr(call, "__self__", None) is outer,
        "wrapper": lambda call: isinstance(call, ThroughWrapper) and (call.outer, call.inner) == (outer, inner),
        "forward": lambda call: type(call) is type(like_forward(inner, len)),
    }
    bad = [
        f"{name} runs as the class has it"
        for name in step.names
        if not _goes(vars(outer).get(name), ways[step.through])
    ]
    yield from each("RegisterEntryPoints", "methods run as forward does", bad)


def _goes(call: Any, way: Any) -> bool:
    return call is not None and way(call)


def cast(step: CastForward, live: LiveModel) -> Iterator[Departure]:
    """The root's forward casts, from and to these dtypes."""
    own = live.modules[""][-1]
    forward = own.forward.forward if isinstance(own.forward, FP8Forward) else own.forward  # which is outside it
    if isinstance(forward, CastedForward) and hasattr(own, MARK):
        found = tuple(str(dtype).removeprefix("torch.") for dtype in (forward.dtype, forward.output_dtype))
        yield from same("CastForward", "cast forward", (step.dtype, step.output_dtype), found)
    else:
        yield from each("CastForward", "cast forward", [f"{type(own).__name__} has its own forward"])


def leaves(step: MarkLeafModules, live: LiveModel) -> Iterator[Departure]:
    """DeepSpeed's own mark stands on each."""
    bad = [path for path in step.paths if not any(getattr(m, "_z3_leaf", False) for m in live.at(path))]
    yield from each("MarkLeafModules", "gathered whole", bad)


def converted(step: ConvertOptimizer, live: LiveModel) -> Iterator[Departure]:
    """The optimizer inside DeepSpeed's is the CPU form."""
    found = getattr(live.target.model, "basic_optimizer", live.target.optimizer)
    yield from same("ConvertOptimizer", "class", step.algorithm, type(found).__name__)


def partitioned(step: PartitionParameters, live: LiveModel) -> Iterator[Departure]:
    """Yield what got a part got values too; that each is in parts, and how large they are, is the layout's to say."""
    del step
    yield from each("PartitionParameters", "everything that was on meta has values", sorted(live.target.unfilled))


def initialised(step: InitializeDeepSpeed, live: LiveModel) -> Iterator[Departure]:
    """The engine's own numbers are the step's, and its optimizer steps what is trained."""
    for what, planned, found in compared(step, live):
        yield from same("InitializeDeepSpeed", what, planned, found)


def regrouped(step: RegroupOptimizer, live: LiveModel) -> Iterator[Departure]:
    """Every name is once in its group, whatever holds it now."""
    yield from each("RegroupOptimizer", "no state is left behind", sorted(live.target.released))
    yield from each("RegroupOptimizer", "groups hold what they held", fsdp.wrong_groups(step, live))


def rebound(step: RebindOptimizer, live: LiveModel) -> Iterator[Departure]:
    """State that was released has been laid out as its parameter lies."""
    del step
    yield from each("RebindOptimizer", "no state is left behind", sorted(live.target.released))
    optimizer = live.target.optimizer
    names = {id(param): name for name, param in reversed(live.params.items())}  # a tied one under its first name
    bad = [
        f"{key} of {names[id(param)]} has {difference}"
        for param, state in (optimizer.state if optimizer else {}).items()
        if id(param) in names
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == param.shape
        for difference in _apart(param, value)
    ]
    yield from each("RebindOptimizer", "state lies as its parameter does", bad)


def _apart(param: Tensor, value: Tensor) -> tuple[str, ...]:
    of_param, of_state = actual_layout(param), actual_layout(value)
    # Class, dtype and requires_grad may differ.
    expected = evolve(of_state, placements=of_param.placements, local_shape=of_param.local_shape)
    return expected.against(of_state)


def created(step: CreateOptimizer, live: LiveModel) -> Iterator[Departure]:
    """Class, parameters and options are those of the step."""
    if hasattr(live.target.model, "basic_optimizer"):
        return  # DeepSpeed has taken it over; what it holds is looked at there
    standing = members(live.target.optimizer)
    optimizer = standing[step.index] if step.index < len(standing) else None
    yield from same("CreateOptimizer", "class", step.algorithm, type(optimizer).__name__)
    groups = optimizer.param_groups if optimizer else []
    slots = [id(param) for group in groups for param in group["params"]]
    holders = {**live.params, **fsdp1_flat.holders(live.target.model)}
    planned = [(step.names, step.options), *((group.names, (*step.options, *group.options)) for group in step.groups)]
    planned = [(names, options) for names, options in planned if names]
    wanted: dict[int, str] = {}
    for name in (name for names, _ in planned for name in names):
        wanted.setdefault(id(holders.get(name)), name)  # what holds several, once
    yield from same("CreateOptimizer", "number of parameters", len(wanted), len(slots))
    bad = [name for (key, name), slot in zip(wanted.items(), slots, strict=False) if key != slot]
    yield from each("CreateOptimizer", "every slot holds the model's parameter", bad)
    yield from same("CreateOptimizer", "groups", len(planned), len(groups))
    bad = [
        f"{name} planned {value}, found {group.get(name)}"
        for (_, options), group in zip(planned, groups, strict=False)
        for name, value in {option.name: option.value for option in options}.items()
        if group.get(name) != value
    ]
    yield from each("CreateOptimizer", "options", bad)
