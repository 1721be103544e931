"""After apply: whether the flat parameters of FSDP1 lie as the plan says, to the element."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

from attrs import evolve
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from prepkit.objects import fsdp1_flat
from prepkit.objects.local_part import local
from prepkit.objects.state import LiveModel, actual_layout, planned_layout
from prepkit.plan import Plan
from prepkit.plan.layout import FlatPart, ParamLayout, coordinate, local_range, local_shape
from prepkit.steps import FlatUnit, RegroupOptimizer, WrapFSDP1


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


FLAT = "_flat_param"
"""Name of the parameter that stands in a unit's module in the place of its own (torch ``FLAT_PARAM``)."""


def flat_names(plan: Plan) -> set[str]:
    """Names of the parameters that a plan puts into the place of the model's own."""
    return {f"{param.unit}.{FLAT}".lstrip(".") for param in plan.layout if param.flat and not param.flat.original}


def wrong_parts(plan: Plan, live: LiveModel, rank: int) -> Iterator[tuple[str, list[str]]]:
    """Name of every flattened parameter, and what differs between its planned and its found place and view."""
    shards = fsdp1_flat.flat_shards(live.target.model) if any(param.flat for param in plan.layout) else {}
    for layout in plan.layout:
        part, shard = layout.flat, shards.get(layout.name)
        if part is None:
            continue
        if shard is None:
            yield layout.name, ["it is in no flat parameter"]
            continue
        planned, actual = _planned_place(layout, part, plan, rank), _actual_place(shard)
        bad = [f"{key} planned {planned[key]}, found {actual[key]}" for key in planned if planned[key] != actual[key]]
        param = live.params.get(layout.name)
        if param is not None:
            bad.extend(planned_layout(_view(layout, plan, rank), plan.mesh, rank).against(actual_layout(param)))
        elif part.original:
            bad.append("the model has no such parameter")
        yield layout.name, bad


def _planned_place(layout: ParamLayout, part: FlatPart, plan: Plan, rank: int) -> dict[str, object]:
    return {
        "unit": layout.unit,
        "start": part.start,
        "elements per rank": part.shard,
        "shape": layout.shape,
        "elements here": local_range(
            part, prod(layout.shape), coordinate(rank, plan.mesh)[-1] if part.shards > 1 else 0
        ),
        "dtype": layout.dtype,
        "still a parameter": part.original,
    }


def _actual_place(shard: fsdp1_flat.FlatShard) -> dict[str, object]:
    return {
        "unit": shard.unit,
        "start": shard.start,
        "elements per rank": shard.shard,
        "shape": tuple(shard.shape),
        "elements here": (shard.first, shard.last),
        "dtype": str(shard.flat.dtype).removeprefix("torch."),
        "still a parameter": shard.original,
    }


def _view(layout: ParamLayout, plan: Plan, rank: int) -> ParamLayout:
    """The layout of the rank's own view: one row of what it holds, or the whole where nothing is cut."""
    return evolve(layout, shape=local_shape(layout, plan.mesh, rank), flat=None)


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
