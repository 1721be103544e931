"""torch ``FullyShardedDataParallel``, one call per unit."""

from __future__ import annotations

from itertools import chain

import torch
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.nn import Module, ModuleDict, ModuleList

from prepkit.live.handlers import problem_texts
from prepkit.live.handlers.allocate import allocate_inside
from prepkit.live.handlers.named_tensors import named_tensors
from prepkit.live.interpreter import Handler
from prepkit.live.model import names
from prepkit.live.model.target import Target
from prepkit.live.ranks import launcher
from prepkit.steps import FlatUnit, WrapFSDP1

STRATEGIES = {
    "FULL_SHARD": ShardingStrategy.FULL_SHARD,
    "SHARD_GRAD_OP": ShardingStrategy.SHARD_GRAD_OP,
    "NO_SHARD": ShardingStrategy.NO_SHARD,
    "HYBRID_SHARD": ShardingStrategy.HYBRID_SHARD,
    "HYBRID_SHARD_ZERO2": ShardingStrategy._HYBRID_SHARD_ZERO2,
}
"""Names of the step to torch's; the last one is public in torch's documentation and private in its enum (K-F2)."""


def wrap_ready(step: WrapFSDP1, target: Target) -> tuple[str, ...]:
    """Everything that FSDP1 refuses must be found here: it has no way back (torch ``_flat_param.py``)."""
    modules, params = names.named_slots(target.model), names.named_parameters(target.model)
    paths = [unit.path for unit in step.units]
    problems = problem_texts.absent("module", (*paths, *step.ignored), modules)
    if hollow := [path for path in paths if path in modules and _is_container(modules[path])]:
        problems += (
            f"{problem_texts.listed(hollow)}: a container without forward cannot be a unit; wrap the modules inside it",
        )
    wrapped = [p for p, module in modules.items() if isinstance(module, FullyShardedDataParallel | FSDPModule)]
    if wrapped:
        problems += (f"{problem_texts.listed(wrapped)}: sharded already; apply to a model that was not prepared",)
    if scalars := [name for name, param in params.items() if param.ndim == 0]:
        problems += (f"{problem_texts.listed(scalars)}: a scalar cannot be flattened; make it a tensor of shape (1,)",)
    if odd := [name for name, param in params.items() if not param.is_floating_point()]:
        problems += (
            f"{problem_texts.listed(odd)}: {params[odd[0]].dtype} cannot be flattened; register it as a buffer",
        )
    if step.sync_module_states and step.device.type == "cpu":
        problems += ("torch broadcasts module states on an accelerator only; plan with sync_module_states=False",)
    return problems + problem_texts.with_gradient(params, params) + launcher.device_problems(step.device.type)


def wrap_do(step: WrapFSDP1, target: Target) -> None:
    """Wraps the units in their order. Of a checkpointed module the checkpoint wrapper goes inside the unit (F1-8).

    Raises ``RuntimeError`` that says which units are wrapped and which one failed.
    """
    if target.mesh is None:
        raise RuntimeError("there is no device mesh to cut over; BuildMesh has to come before WrapFSDP1")
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
            name = problem_texts.listed([unit.path])
            progress = f"wrapped before it: {problem_texts.listed(done)}" if done else "it was the first"
            raise RuntimeError(f"unit {name} could not be wrapped ({progress}): {error}") from error
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
