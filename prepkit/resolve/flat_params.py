"""Where each parameter lies in the flat parameter of its FSDP1 unit."""

from __future__ import annotations

from prepkit.config import FSDP1, Config, Mixed
from prepkit.facts import Facts
from prepkit.plan.dtypes import itemsize
from prepkit.plan.flat_layout import FlatPart, flatten
from prepkit.resolve.fsdp1 import batch_norms, members
from prepkit.resolve.mesh import axes
from prepkit.resolve.precision import stored_dtypes


def flat_parts(cfg: Config, facts: Facts) -> dict[str, FlatPart]:
    """Parameter name to its place in the flat parameter of its unit; ignored ones have none."""
    assert isinstance(cfg.engine, FSDP1), "only FSDP1 flattens"
    mesh = axes(cfg, facts.env) or ()
    ranks, cut = (mesh[-1].size, mesh[-1].name == "shard") if mesh else (1, False)
    full = batch_norms(facts.model)
    stored = stored_dtypes(cfg, facts)
    found: dict[str, FlatPart] = {}
    for path, held in members(cfg, facts.model).items():
        low = isinstance(cfg.precision, Mixed) and path not in full
        own = "float32" if isinstance(cfg.precision, Mixed) else stored[held[0].name]
        size = 2 if low else itemsize(own)
        sizes = tuple(param.numel for param in held)
        parts = flatten(sizes, itemsize=size, ranks=ranks, cut=cut, original=cfg.engine.use_orig_params)
        found.update(zip((param.name for param in held), parts, strict=True))
    return found
