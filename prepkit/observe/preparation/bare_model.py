"""The facts of the model as it was before anything was put around it or cut in it."""

from __future__ import annotations

from typing import Any

from attrs import evolve
from torch import nn

from prepkit.facts import ModelFacts, ParamFact
from prepkit.objects import fsdp1_flat
from prepkit.objects.names import canonical
from prepkit.observe.model import dtype_name


def bare_model(seen: ModelFacts, model: nn.Module) -> ModelFacts:
    """Without marks, units, placements and what wrappers have hung on parameters; shapes and names are the model's own.

    ``seen`` are the facts of the prepared model. Dtypes are those in which parameters are stored now.
    """
    flat = fsdp1_flat.flat_shards(model)
    params = [_whole(param, flat) for param in seen.params if not (flat and _is_flat(param.name))]
    there = {param.name for param in params}
    params += [_flattened(name, one) for name, one in flat.items() if name not in there]
    order = {module.path: index for index, module in enumerate(seen.modules)}
    if len(params) > len(there):
        params.sort(key=lambda param: order.get(param.name.rpartition(".")[0], -1))  # stable: as torch flattens them
    prepared = bool(seen.units or flat or any(param.cls in REPLACED for param in seen.params))
    return evolve(
        seen,
        modules=tuple(evolve(module, marks=()) for module in seen.modules),
        params=tuple(params),
        ties=_ties(seen, flat, model) if flat else seen.ties,
        units=(),
        forward="bound",
        param_hooks=() if prepared else seen.param_hooks,
        strided=() if prepared else seen.strided,
        prepared="",
    )


REPLACED = ("DTensor", "ZeroParameter")
"""Classes of parameters that sharding puts in the place of the model's own."""


def _is_flat(name: str) -> bool:
    """Return whether it is the name that FSDP1 gives a unit's flat parameter (torch ``_flat_param.FLAT_PARAM``)."""
    return name.rpartition(".")[2] == "_flat_param"


def _whole(param: ParamFact, flat: dict[str, fsdp1_flat.FlatShard]) -> ParamFact:
    shape = tuple(flat[param.name].shape) if param.name in flat else param.shape
    return evolve(param, shape=shape, placements=(), cls="Parameter" if param.cls in REPLACED else param.cls)


def _flattened(name: str, part: fsdp1_flat.FlatShard) -> ParamFact:
    return ParamFact(
        name=name,
        shape=tuple(part.shape),
        dtype=dtype_name(part.flat.dtype),
        requires_grad=part.flat.requires_grad,
    )


def _ties(seen: ModelFacts, flat: dict[str, fsdp1_flat.FlatShard], model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """As ``seen``; where a flat parameter stands in several places, all that lie in it do."""
    ties = [group for group in seen.ties if not any(map(_is_flat, group))]
    for group in seen.ties:
        places = [name.rpartition(".")[0] for name in group if _is_flat(name)]
        inside = [name for name, part in flat.items() if places and part.unit == places[0]]
        ties += [tuple(f"{place}{name.removeprefix(places[0])}" for place in places) for name in inside]
    return (*ties, *_flat_ties(model))


def _flat_ties(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Names that were one parameter, where the flat one has taken its place (torch ``_shared_param_infos``)."""
    groups: dict[str, list[str]] = {}
    for path, unit in fsdp1_flat.units(model).items():
        handle: Any = unit._handle
        for tied in handle.flat_param._shared_param_infos if handle is not None else ():
            pairs = ((tied.prim_module_name, tied.prim_param_name), (tied.module_name, tied.param_name))
            first, other = (_joined(path, module, name) for module, name in pairs)
            groups.setdefault(first, [first]).append(other)
    return tuple(map(tuple, groups.values()))


def _joined(unit: str, module: str, name: str) -> str:
    return ".".join(part for part in (unit, canonical(module), name) if part)
