"""What FSDP1 and ``fully_shard`` have left behind: units, policies, hooks, and an optimizer of flat parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn import Module

from prepkit.facts.run import Departure, each, same
from prepkit.objects import fsdp1_flat
from prepkit.objects.fsdp2_units import unit_fact
from prepkit.objects.local_part import local
from prepkit.objects.state import LiveModel
from prepkit.objects.whole_gradients import WholeGradients
from prepkit.ranks.world import ranks_of
from prepkit.steps import AverageGradients, FlatUnit, RegroupOptimizer, ShardUnits, Unit, WrapFSDP1


def wrong_units(step: WrapFSDP1, live: LiveModel) -> list[str]:
    """Units that are not there, were not planned, or were given another strategy or dtype."""
    wrappers = fsdp1_flat.units(live.target.model)
    planned = {unit.path: unit for unit in step.units}
    bad = [f"{path or 'the root'} is none" for path in sorted(set(planned) - set(wrappers))]
    bad += [f"{path or 'the root'} was not planned" for path in wrappers if path not in planned]
    for path, unit in wrappers.items():
        strategy = unit.sharding_strategy.name.lstrip("_")
        if strategy != step.sharding:
            bad.append(f"{path or 'the root'} is {strategy}")
        if path in planned:
            bad += [f"{path or 'the root'} {text}" for text in _differs(step, planned[path], unit)]
    return bad


def _differs(step: WrapFSDP1, planned: FlatUnit, unit: FullyShardedDataParallel) -> Iterator[str]:
    """Dtypes, offload and the order of gathering, where they are not those of the step."""
    dtypes = unit.mixed_precision
    if planned.full_precision:
        wanted: tuple[str | None, ...] = ("float32", "float32", "float32")
    else:
        wanted = (step.param_dtype, step.reduce_dtype, step.buffer_dtype)
    found = tuple(_name(dtype) for dtype in (dtypes.param_dtype, dtypes.reduce_dtype, dtypes.buffer_dtype))
    for verb, here, there in zip(("computes in", "reduces in", "keeps buffers in"), wanted, found, strict=True):
        if here != there:
            yield f"{verb} {there}"
    casts = (step.cast_forward_inputs and not planned.full_precision, step.cast_root_forward_inputs)
    if (dtypes.cast_forward_inputs, dtypes.cast_root_forward_inputs) != casts:
        both = (dtypes.cast_forward_inputs, dtypes.cast_root_forward_inputs)
        yield f"inputs cast planned {casts}, found {both}, for units and for a root"
    prefetch = unit.backward_prefetch
    options = {
        "offload": unit.cpu_offload.offload_params,
        "backward_prefetch": None if prefetch is None else prefetch.name,
        "forward_prefetch": unit.forward_prefetch,
        "limit_all_gathers": unit.limit_all_gathers,
        "use_orig_params": unit._use_orig_params,
    }
    for name, value in options.items():
        if getattr(step, name) != value:
            yield f"{name} planned {getattr(step, name)}, found {value}"


def _name(dtype: object) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def wrong_groups(step: RegroupOptimizer, live: LiveModel) -> list[str]:
    """Names that are not once in their group, under whatever holds them now: what was trained before still is."""
    holders, optimizer = fsdp1_flat.holders(live.target.model), live.target.optimizer
    groups = optimizer.param_groups if optimizer else []
    bad = [] if len(groups) == len(step.slots) else [f"there are {len(groups)} groups, not {len(step.slots)}"]
    for index, (slots, group) in enumerate(zip(step.slots, groups, strict=False)):
        ids = Counter(id(param) for param in group["params"])
        bad += [f"group {index} does not hold {name}" for name in slots if name and ids[id(holders.get(name))] != 1]
    return bad


def wrong_states(live: LiveModel) -> list[str]:
    """State tensors that do not lie as their parameter does: no cut of one is a cut of the other."""
    optimizer = live.target.optimizer
    names = {id(param): name for name, param in reversed(fsdp1_flat.holders(live.target.model).items())}
    return [
        f"{key} of {names[id(param)]} has shape {tuple(value.shape)}, the parameter {tuple(local(param).shape)}"
        for param, state in (optimizer.state if optimizer else {}).items()
        if id(param) in names
        for key, value in state.items()
        if isinstance(value, Tensor) and value.ndim and value.shape != param.shape
    ]


def checks(step: ShardUnits, live: LiveModel) -> Iterator[Departure]:
    """Hooks and policies of the units that are there; a missing one has been told already."""
    units = [(unit, module) for unit in step.units for module in live.at(unit.path) if isinstance(module, FSDPModule)]
    hooks = [f"{unit.path or 'the root'} has none" for unit, module in units if not _gathers(module)]
    yield from each("ShardUnits", "a hook gathers each unit", hooks)
    bad = [f"{unit.path or 'the root'}: {text}" for unit, module in units for text in _policies(step, unit, module)]
    yield from each("ShardUnits", "dtypes, offload and resharding of each unit", bad)


def _gathers(module: Any) -> bool:
    """Return whether the unit's own state hears the module's forward begin and end: there it gathers and frees."""
    state = module._get_fsdp_state()
    tables = (module._forward_pre_hooks, module._forward_hooks)
    return all(any(_of(state, hook) for hook in hooks.values()) for hooks in tables)


def _of(state: Any, hook: Any) -> bool:
    """Return whether a hook is a method of this state, also below the wrappers that torch puts around it."""
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


def averaged(step: AverageGradients, live: LiveModel) -> Iterator[Departure]:
    """The planned parameters, and no others, are handed over to be averaged, over all ranks that read other data."""
    whole = live.target.whole_gradients
    watched = whole if isinstance(whole, WholeGradients) else None
    held = {id(param) for param in watched.params} if watched else set()
    bad = [name for name in step.names if id(live.params.get(name)) not in held]
    bad += [] if watched and watched.watches else ["no optimizer is watched"]
    yield from each("AverageGradients", "what every rank holds whole is averaged", bad)
    mesh = live.target.mesh
    axes = (step.axes or mesh.mesh_dim_names or ()) if mesh is not None else ()
    wanted = [mesh[axis].size() for axis in axes if mesh is not None and mesh[axis].size() > 1]
    found = [ranks_of(group).size for group in watched.groups] if watched else []
    yield from same("AverageGradients", "sizes of the groups", wanted, found)
