"""FSDP1's flat parameters: which parameters each holds, and where each of them lies in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping

from prepkit.config import FSDP1, Config, Mixed
from prepkit.facts import ModelFacts, ParamFact
from prepkit.plan.layout import FlatPart, flatten, itemsize
from prepkit.resolve.engines import engine_of
from prepkit.resolve.units import every_batch_norm
from prepkit.steps import Axis


def flat_params(
    unit_of: Mapping[str, str], ignored: Container[str], model: ModelFacts
) -> dict[str, tuple[ParamFact, ...]]:
    """Path of every FSDP1 unit that holds a parameter to its parameters, in the order in which torch flattens them.

    ``unit_of``: parameter name to the path of its unit. ``ignored``: names of parameters that no unit takes.
    """
    units: dict[str, list[ParamFact]] = defaultdict(list)
    for param in model.params:
        if param.name not in ignored:
            units[unit_of[param.name]].append(param)
    return {path: tuple(params) for path, params in units.items()}


# --- flat parameters -------------------------------------------------------------------------------------------------


def flat_shards(
    cfg: Config,
    model: ModelFacts,
    mesh: tuple[Axis, ...],
    flat_params: Mapping[str, tuple[ParamFact, ...]],
    stored_dtypes: Mapping[str, str],
) -> dict[str, FlatPart]:
    """Parameter name to its place in the flat parameter of its unit; ignored ones have none.

    ``flat_params``: path of a unit to what it flattens, in order. ``stored_dtypes``: name to dtype in storage.
    """
    engine = engine_of(cfg, FSDP1)
    *_, last = mesh
    original = engine.use_orig_params
    norms = every_batch_norm(model)
    places: dict[str, FlatPart] = {}
    for path, params in flat_params.items():
        low = isinstance(cfg.precision, Mixed) and path not in norms
        own = "float32" if isinstance(cfg.precision, Mixed) else stored_dtypes[params[0].name]
        size = 2 if low else itemsize(own)
        sizes = tuple(param.numel for param in params)
        parts = flatten(sizes, itemsize=size, ranks=last.size, cut=last.name == "shard", original=original)
        places.update(zip((param.name for param in params), parts, strict=True))
    return places
