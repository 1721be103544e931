"""Where each parameter lies in the flat parameter of its FSDP1 unit."""

from __future__ import annotations

from collections.abc import Mapping

from prepkit.config import FSDP1, Config, Mixed
from prepkit.facts import ModelFacts, ParamFact
from prepkit.plan.dtypes import itemsize
from prepkit.plan.flat_layout import FlatPart, flatten
from prepkit.resolve.units import every_batch_norm
from prepkit.steps import Axis


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
    assert isinstance(cfg.engine, FSDP1), "only FSDP1 flattens"
    *_, last = mesh
    original = cfg.engine.use_orig_params
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
