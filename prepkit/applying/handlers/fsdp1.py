"""torch ``FullyShardedDataParallel``, one call per unit."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import Any

import torch
from attrs import frozen
from torch._subclasses import FakeTensor
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.nn import Module, ModuleDict, ModuleList, Parameter

from prepkit.applying.handlers import problems
from prepkit.applying.handlers.allocate import allocate_inside
from prepkit.applying.handlers.named_tensors import named_tensors
from prepkit.applying.handlers.optimizer import shape_problems
from prepkit.applying.handlers.optimizer_state import ParamState, lay_out
from prepkit.court import refused
from prepkit.interpreter import Handler
from prepkit.objects import fsdp1_flat, names
from prepkit.objects.target import Target
from prepkit.ranks import launcher
from prepkit.steps import FlatUnit, RegroupOptimizer, WrapFSDP1

STRATEGIES = {
    "FULL_SHARD": ShardingStrategy.FULL_SHARD,
    "SHARD_GRAD_OP": ShardingStrategy.SHARD_GRAD_OP,
    "NO_SHARD": ShardingStrategy.NO_SHARD,
    "HYBRID_SHARD": ShardingStrategy.HYBRID_SHARD,
    "HYBRID_SHARD_ZERO2": ShardingStrategy._HYBRID_SHARD_ZERO2,
}
"""Names of the step to torch's; the last one is public in torch's documentation and private in its enum (K-F2)."""


def wrap_ready(step: WrapFSDP1, target: Target) -> problems.Problems:
    """Everything that FSDP1 refuses must be found here: it has no way back (torch ``_flat_param.py``)."""
    modules, params = names.named_slots(target.model), names.named_parameters(target.model)
    paths = [unit.path for unit in step.units]
    wrapped = (path for path, module in modules.items() if isinstance(module, FullyShardedDataParallel | FSDPModule))
    scalars = (name for name, param in params.items() if param.ndim == 0)
    odd = [name for name, param in params.items() if not param.is_floating_point()]
    dtype = params[odd[0]].dtype if odd else None
    alone = ["config.engine"] if step.sync_module_states and step.device.type == "cpu" else []
    return (
        *problems.absent("module", (*paths, *step.ignored), modules),
        *problems.hollow(path for path in paths if path in modules and _is_container(modules[path])),
        *problems.told("model.already-wrapped", wrapped, "sharded already", problems.PLAIN),
        *problems.told("units.scalar", scalars, "a scalar cannot be flattened", "Make it a tensor of shape (1,)."),
        *problems.told("units.integer", odd, f"{dtype} cannot be flattened"),
        *problems.told("fsdp1.sync-on-cpu", alone, "torch broadcasts module states on an accelerator only"),
        *problems.with_gradient(params, params),
        *launcher.device_problems(step.device.type),
    )


def wrap_do(step: WrapFSDP1, target: Target) -> None:
    """Wraps the units in their order. Of a checkpointed module the checkpoint wrapper goes inside the unit (F1-8).

    Raises ``RunRefused`` that says which units are wrapped and which one failed.
    """
    if target.mesh is None:
        raise problems.no_mesh("cut over")
    device = launcher.bind(step.device)
    modules = names.named_slots(target.model)
    ignored = [modules[path] for path in step.ignored]
    target.together()  # sync_module_states is a collective of each unit
    if step.allocates:
        target.unfilled |= {name for name, tensor in named_tensors(target).items() if tensor.is_meta}
        for module in ignored:
            allocate_inside(module, device)
    for module in ignored:  # FSDP1 moves everything else (F1-6)
        if any(tensor.device != device for tensor in chain(module.parameters(), module.buffers())):
            module.to(device)
    done: list[str] = []
    for unit in step.units:
        try:
            if step.allocates:  # what the units inside have flattened is no longer on meta
                allocate_inside(modules[unit.path], device)
            wrapped = _wrap(step, unit, modules[unit.path], target, device, ignored)
        except Exception as error:
            name = problems.listed([unit.path])
            progress = f"wrapped before it: {problems.listed(done)}" if done else "it was the first"
            raise problems.step_refused(f"unit {name}", f"could not be wrapped ({progress})", error) from error
        _put(target, unit.path, modules[unit.path], wrapped)
        done.append(unit.path)


def _wrap(
    step: WrapFSDP1, unit: FlatUnit, module: Module, target: Target, device: torch.device, ignored: list[Module]
) -> FullyShardedDataParallel:
    if unit.full_precision:  # its inputs stay: kernels take float32 statistics with bfloat16 activations (pain 40)
        full = torch.float32
        precision = MixedPrecision(
            full, full, full, cast_forward_inputs=False, cast_root_forward_inputs=step.cast_root_forward_inputs
        )
    else:
        param, reduce, buffer = map(_dtype, (step.param_dtype, step.reduce_dtype, step.buffer_dtype))
        precision = MixedPrecision(
            param,
            reduce,
            buffer,
            cast_forward_inputs=step.cast_forward_inputs,
            cast_root_forward_inputs=step.cast_root_forward_inputs,
        )
    return FullyShardedDataParallel(
        module,
        device_mesh=target.mesh,
        sharding_strategy=STRATEGIES[step.sharding],
        cpu_offload=CPUOffload(offload_params=step.offload),
        backward_prefetch=None if step.backward_prefetch is None else BackwardPrefetch[step.backward_prefetch],
        mixed_precision=precision,
        ignored_states=ignored,
        device_id=device,
        sync_module_states=step.sync_module_states,
        forward_prefetch=step.forward_prefetch,
        limit_all_gathers=step.limit_all_gathers,
        use_orig_params=step.use_orig_params,
    )


def _put(target: Target, path: str, old: Module, new: Module) -> None:
    """Into every slot of every parent, or in the place of the model."""
    if not path:
        target.model = new
        return
    slots = [(parent, name) for parent in target.model.modules() for name, m in parent._modules.items() if m is old]
    for parent, name in slots:
        parent.register_module(name, new)


def _is_container(module: Module) -> bool:
    return isinstance(module, ModuleList | ModuleDict) and type(module).forward is Module.forward


def _dtype(name: str | None) -> torch.dtype | None:
    dtype: torch.dtype | None = getattr(torch, name) if name else None
    return dtype


WRAP: Handler[WrapFSDP1, Target, None] = Handler(ready=wrap_ready, do=wrap_do)


@frozen(repr=False)
class Grouped:
    """What the optimizer held before."""

    params: tuple[list[Any], ...]
    """Per group."""
    released: dict[str, ParamState]


def regroup_ready(step: RegroupOptimizer, target: Target) -> problems.Problems:
    """Every name must be a parameter; which unit it falls into is known once the units are wrapped."""
    holders = fsdp1_flat.holders(target.model)
    named = (name for group in step.slots for name in group if name)
    return shape_problems(step.slots, target) + problems.absent("parameter", named, holders)


def regroup_do(step: RegroupOptimizer, target: Target) -> Grouped:
    """Each group gets the holder of each of its names once, in order; what is not the model's stays where it is.

    Raises ``RunRefused``, with nothing changed, when one holder falls into two groups or states do not join.
    """
    optimizer = target.optimizer
    assert optimizer is not None, "its check was asked"
    holders, pieces = fsdp1_flat.holders(target.model), fsdp1_flat.flat_shards(target.model)
    before = Grouped(tuple(list(group["params"]) for group in optimizer.param_groups), dict(target.released))
    groups: list[list[torch.Tensor]] = []
    group_of: dict[int, int] = {}
    for index, (slots, group) in enumerate(zip(step.slots, optimizer.param_groups, strict=True)):
        members: dict[int, torch.Tensor] = {}
        for name, tensor in zip(slots, group["params"], strict=True):
            param = holders[name] if name else tensor
            if group_of.setdefault(id(param), index) != index:
                raise refused("fsdp1.unit-in-two-groups", name, "its flat parameter falls into two groups")
            members[id(param)] = param
        groups.append(list(members.values()))
    on_device = {key: _on_device(optimizer.param_groups[index]) for key, index in group_of.items()}
    states = _joined(target.released, holders, pieces, on_device)
    try:
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = params
        optimizer.state.update(states)
        target.released.clear()
        return before
    except BaseException:
        regroup_undo(step, target, before)
        raise


def _on_device(group: dict[str, Any]) -> bool:
    """True if the optimizer wants its counters where the parameters are."""
    return bool(group.get("capturable") or group.get("fused"))


def _joined(
    released: dict[str, ParamState],
    holders: dict[str, Parameter],
    pieces: dict[str, fsdp1_flat.FlatShard],
    on_device: dict[int, bool],
) -> dict[torch.Tensor, ParamState]:
    """Flat parameter to the joined state of what it holds; a parameter that is still there keeps its own."""
    inside: dict[int, list[str]] = defaultdict(list)
    for name, piece in pieces.items():
        inside[id(piece.flat)].append(name)
    joined: dict[torch.Tensor, ParamState] = {}
    for name, state in released.items():
        param = holders[name]
        members = inside.get(id(param), [])
        if not members:
            joined[param] = lay_out(state, param, scalars_on_device=on_device[id(param)])
        elif param not in joined:
            if missing := [other for other in members if other not in released]:
                what = "without the state that others of its unit have"
                raise refused("optimizer.state-layout", problems.listed(missing), what)
            joined[param] = _join({n: released[n] for n in members}, pieces, param, on_device[id(param)])
    return joined


def _join(
    states: dict[str, ParamState], pieces: dict[str, fsdp1_flat.FlatShard], param: Parameter, on_device: bool
) -> ParamState:
    first, *others = states
    listed = problems.listed(list(states))
    if any(states[name].keys() != states[first].keys() for name in others):
        raise refused("optimizer.state-layout", listed, "states of different kinds")
    joined: ParamState = {}
    for key, first_value in states[first].items():
        values = {name: state[key] for name, state in states.items()}
        if isinstance(first_value, torch.Tensor) and first_value.shape == pieces[first].shape:
            joined[key] = _concatenated(values, pieces, param)
        elif all(_equal(value, first_value) for value in values.values()):
            joined[key] = (
                first_value.to(param.device) if isinstance(first_value, torch.Tensor) and on_device else first_value
            )
        else:
            raise refused("optimizer.state-layout", listed, f"{key!r} differs, and a flat parameter has one")
    return joined


def _concatenated(
    values: dict[str, torch.Tensor], pieces: dict[str, fsdp1_flat.FlatShard], param: Parameter
) -> torch.Tensor:
    """The states end to end, as much of them as this rank holds, 0 in the padding."""
    dtype = next(iter(values.values())).dtype
    flat = torch.zeros(param.shape, dtype=dtype, device=param.device)
    for name, value in values.items():
        piece = pieces[name]
        if piece.first < piece.last:
            begin = piece.start + piece.first - (piece.shard * _index(piece) if piece.cut else 0)
            flat[begin : begin + piece.last - piece.first] = piece.part(value).to(param.device)
    return flat


def _index(piece: fsdp1_flat.FlatShard) -> int:
    """Return which shard of its flat parameter this rank holds."""
    return (piece.start + piece.first) // piece.shard


def _equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return isinstance(a, FakeTensor) or bool(torch.equal(a.cpu(), b.cpu()))  # a rehearsal has no values
    return a == b


def regroup_undo(step: RegroupOptimizer, target: Target, memo: Grouped) -> None:
    """Puts back what each group held; the state is that from before, whole."""
    del step
    optimizer = target.optimizer
    assert optimizer is not None, "it was there when its groups were changed"
    for group, params in zip(optimizer.param_groups, memo.params, strict=True):
        for param in group["params"]:
            optimizer.state.pop(param, None)
        group["params"] = params
    target.released.update(memo.released)


REGROUP: Handler[RegroupOptimizer, Target, Grouped] = Handler(ready=regroup_ready, do=regroup_do, undo=regroup_undo)
