"""torch ``fully_shard``, one call per unit."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn import Module, ModuleDict, ModuleList, Parameter

from prepkit.live.handlers import problem_texts
from prepkit.live.handlers.fsdp2_chunks import lean_chunks
from prepkit.live.interpreter import Handler
from prepkit.live.model import names, param_extras
from prepkit.live.model.fsdp2_units import unit_facts
from prepkit.live.model.target import Target
from prepkit.steps import ShardUnits, Unit


def shard_ready(step: ShardUnits, target: Target) -> tuple[str, ...]:
    """Everything that ``fully_shard`` refuses must be found here: it has no way back (G-8, torch ``_fsdp_init.py``)."""
    old = (_OLD,) if step.reduce_unused and not hasattr(FSDPModule, _UNUSED) else ()
    if step.already_sharded:
        return old + _other_units(step, target)
    modules, params = names.named_slots(target.model), names.named_parameters(target.model)
    paths = [unit.path for unit in step.units]
    problems = problem_texts.absent("module", paths, modules)
    if hollow := [path for path in paths if path in modules and _is_container(modules[path])]:
        problems += (
            f"{problem_texts.listed(hollow)}: a container without forward cannot be a unit; wrap the modules inside it",
        )
    if sharded := [path for path, module in modules.items() if isinstance(module, FSDPModule)]:
        problems += (f"{problem_texts.listed(sharded)}: sharded already; apply to a model that was not prepared",)
    problems += problem_texts.absent("parameter", step.ignored, params)
    if scalars := [name for name, param in params.items() if param.ndim == 0 and name not in set(step.ignored)]:
        problems += (f"{problem_texts.listed(scalars)}: a scalar cannot be sharded; plan it among the ignored ones",)
    return old + problems + problem_texts.with_gradient(params, params)


_UNUSED = "set_reduce_scatter_unused_params"
_OLD = f"reduce_unused: this torch {torch.__version__} has no FSDPModule.{_UNUSED}; pip install 'torch>=2.13'"


def _other_units(step: ShardUnits, target: Target) -> tuple[str, ...]:
    """Units that the plan takes for granted, and those that it does not know."""
    existing = {unit.path for unit in unit_facts(names.sites(target.model))}
    planned = {unit.path for unit in step.units}
    texts = "planned as a unit already, which it is not", "a unit already, which was not planned"
    differences = (sorted(planned - existing), sorted(existing - planned))
    again = "build the plan again from this model"
    return tuple(
        f"{problem_texts.listed(paths)}: {text}; {again}"
        for paths, text in zip(differences, texts, strict=True)
        if paths
    )


def shard_do(step: ShardUnits, target: Target) -> None:
    """Shards the units in their order. Of a checkpointed module the wrapper becomes the unit: recomputing calls it.

    Raises ``RuntimeError`` that says which units are sharded and which one failed.
    """
    if not step.already_sharded:
        _shard_all(step, target)
    if step.reduce_unused:
        modules = names.named_slots(target.model)
        for unit in step.units:
            getattr(modules[unit.path], _UNUSED)(step.reduce_unused, recurse=False)


def _shard_all(step: ShardUnits, target: Target) -> None:
    if target.mesh is None:
        raise RuntimeError("there is no device mesh to shard over; BuildMesh has to come before ShardUnits")
    modules, ignored = names.named_slots(target.model), _ignored_params(step, target)
    kept = param_extras.every_attribute(target.model)
    done: list[str] = []
    with lean_chunks():
        for unit in step.units:
            try:
                _shard(step, unit, modules[unit.path], target, ignored)
            except Exception as error:
                name = problem_texts.listed([unit.path])
                progress = f"sharded before it: {problem_texts.listed(done)}" if done else "it was the first"
                raise RuntimeError(f"unit {name} could not be sharded ({progress}): {error}") from error
            done.append(unit.path)
    param_extras.carry_over(target.model, kept)


def _ignored_params(step: ShardUnits, target: Target) -> set[Parameter]:
    """The ignored parameters, moved to the mesh's device, as ``fully_shard`` moves what it shards (M2-6)."""
    if not step.ignored:
        return set()
    modules, params = names.named_modules(target.model), names.named_parameters(target.model)
    device = target.mesh.device_type if target.mesh is not None else "cpu"
    for name in step.ignored:
        param = params[name]
        if param.device.type in (device, "meta"):
            continue
        if type(param) is Parameter:
            param.data = param.data.to(device)  # alone: its module may be the model
        else:
            modules[name.rpartition(".")[0]].to(torch.device(device))  # a packed weight takes what unpacks it along
    params = names.named_parameters(target.model)
    return {params[name] for name in step.ignored}


def _shard(step: ShardUnits, unit: Unit, module: Module, target: Target, ignored: set[Parameter]) -> None:
    precision = MixedPrecisionPolicy(
        param_dtype=_dtype(step.param_dtype),
        reduce_dtype=_dtype(step.reduce_dtype),
        output_dtype=_dtype(unit.output_dtype),
        cast_forward_inputs=step.cast_forward_inputs,
    )
    if unit.full_precision:  # its inputs stay: kernels take float32 statistics with bfloat16 activations (pain 40)
        precision = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=False)
    more: dict[str, Any] = {"ignored_params": ignored} if ignored else {}  # torch 2.6 does not know it
    # torch can pin host memory only where it has an accelerator to pin it for.
    pin = step.pin_memory and torch.accelerator.is_available()
    fully_shard(
        module,
        mesh=target.mesh[step.axes] if step.axes and target.mesh is not None else target.mesh,
        reshard_after_forward=unit.reshard_after_forward,
        mp_policy=precision,
        offload_policy=CPUOffloadPolicy(pin_memory=pin) if step.offload else OffloadPolicy(),
        **more,
    )


def _is_container(module: Module) -> bool:
    return isinstance(module, ModuleList | ModuleDict) and type(module).forward is Module.forward


def _dtype(name: str | None) -> torch.dtype | None:
    dtype: torch.dtype | None = getattr(torch, name) if name else None
    return dtype


SHARD: Handler[ShardUnits, Target, None] = Handler(ready=shard_ready, do=shard_do)
