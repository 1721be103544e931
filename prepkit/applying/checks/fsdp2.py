"""What ``fully_shard`` left on each unit: hooks that gather it, and the policies that were asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from prepkit.objects.fsdp2_units import unit_fact
from prepkit.objects.state import LiveModel
from prepkit.objects.whole_gradients import WholeGradients
from prepkit.plan.attestation import Check, each, same
from prepkit.steps import AverageGradients, ShardUnits, Unit


def checks(step: ShardUnits, live: LiveModel) -> Iterator[Check]:
    """Hooks and policies of the units that are there; a missing one has been told already."""
    units = [(unit, module) for unit in step.units for module in live.at(unit.path) if isinstance(module, FSDPModule)]
    hooks = [f"{unit.path or 'the root'} has none" for unit, module in units if not _gathers(module)]
    yield each("ShardUnits", "a hook gathers each unit", hooks)
    bad = [f"{unit.path or 'the root'}: {text}" for unit, module in units for text in _policies(step, unit, module)]
    yield each("ShardUnits", "dtypes, offload and resharding of each unit", bad)


def _gathers(module: Any) -> bool:
    """Whether the unit's own state hears the module's forward begin and end: there it gathers and frees."""
    state = module._get_fsdp_state()
    tables = (module._forward_pre_hooks, module._forward_hooks)
    return all(any(_of(state, hook) for hook in hooks.values()) for hooks in tables)


def _of(state: Any, hook: Any) -> bool:
    """Whether a hook is a method of this state, also below the wrappers that torch puts around it."""
    for _ in range(4):
        if getattr(hook, "__self__", None) is state:
            return True
        hook = getattr(hook, "__wrapped__", None)
    return False


def _policies(step: ShardUnits, unit: Unit, module: Module) -> Iterator[str]:
    """Where ``fully_shard`` was asked for something else; a unit without parameters has no group that could say."""
    actual = unit_fact(unit.path, module)
    wanted = (step.param_dtype, step.reduce_dtype, unit.output_dtype)
    if unit.full_precision:
        wanted = ("float32", "float32", None)
    if (dtypes := (actual.param_dtype, actual.reduce_dtype, actual.output_dtype)) != wanted:
        yield f"parameter, reduction and output dtype planned {wanted}, found {dtypes}"
    casts = step.cast_forward_inputs and not unit.full_precision
    if not step.already_sharded and actual.cast_forward_inputs != casts:
        yield f"cast_forward_inputs planned {casts}, found {actual.cast_forward_inputs}"
    if actual.ranks and actual.reduce_unused != step.reduce_unused:
        yield f"reduce_unused planned {step.reduce_unused}, found {actual.reduce_unused}"
    if actual.ranks and actual.offload != step.offload:
        yield f"offload planned {step.offload}, found {actual.offload}"
    if actual.ranks and bool(actual.reshard_after_forward) != bool(unit.reshard_after_forward):
        yield f"reshard_after_forward planned {unit.reshard_after_forward}, found {actual.reshard_after_forward}"


def averaged(step: AverageGradients, live: LiveModel) -> Iterator[Check]:
    """The planned parameters, and no others, are handed over to be averaged, over all ranks that read other data."""
    whole = live.target.whole_gradients
    watched = whole if isinstance(whole, WholeGradients) else None
    held = {id(param) for param in watched.params} if watched else set()
    bad = [name for name in step.names if id(live.params.get(name)) not in held]
    bad += [] if watched and watched.watches else ["no optimizer is watched"]
    yield each("AverageGradients", "what every rank holds whole is averaged", bad)
    mesh = live.target.mesh
    axes = (step.axes or mesh.mesh_dim_names or ()) if mesh is not None else ()
    wanted = [mesh[axis].size() for axis in axes if mesh is not None and mesh[axis].size() > 1]
    found = [dist.get_world_size(group) for group in watched.groups] if watched else []
    yield same("AverageGradients", "sizes of the groups", wanted, found)
