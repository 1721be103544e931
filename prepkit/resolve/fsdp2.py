"""What FSDP2 makes of a model, or finds made where the model arrives sharded. Sums that rules and planner share."""

from __future__ import annotations

from prepkit.config import FSDP2
from prepkit.facts import ModelFacts, ParamFact
from prepkit.resolve.modules import PACKED, packed_params
from prepkit.resolve.units import ignored_params

LAZY = frozenset({"UninitializedParameter"})
"""Classes of parameters that have no shape yet."""
STORED_AS = ("bfloat16", "float16", "float32")
"""Dtypes that 4-bit weights can be stored as (``bnb_4bit_quant_storage``) so that shards of them are gathered."""


def standing_units(model: ModelFacts) -> tuple[str, ...]:
    """Paths of the units below the root that a model arrives with, children before parents."""
    return tuple(unit.path for unit in model.units if unit.path)


def scalars(model: ModelFacts) -> tuple[str, ...]:
    """Names of the parameters without dimensions: a single number each, with nothing that could be cut."""
    return tuple(param.name for param in model.params if param.shape == () and param.cls not in LAZY)


def unsharded_params(engine: FSDP2, model: ModelFacts, gathered_as: str | None) -> tuple[str, ...]:
    """Names of the parameters that every rank holds whole, in module order.

    Those that are packed and cannot be sharded, have no dimension, or are in ignored modules; in a sharded model those
    that came whole. ``gathered_as``: the dtype that units are gathered in; None: each parameter as it is stored.
    """
    if model.units:
        return tuple(param.name for param in model.params if param.cls != "DTensor")
    whole = set(packed_params(model)) - {param.name for param in model.params if shards_packed(param, gathered_as)}
    whole |= {*scalars(model), *ignored_params(engine, model)}
    return tuple(param.name for param in model.params if param.name in whole)


def shards_packed(param: ParamFact, gathered_as: str | None) -> bool:
    """Return whether a packed weight can be cut into rows and gathered again bit by bit (M2-7).

    What is stored in a floating dtype is gathered like any parameter, and bitsandbytes' layer, which keeps what unpacks
    it, takes the gathered bytes as its weight (``fix_4bit_weight_quant_state_from_module``). A cast would change the
    bytes' meaning, so that storage and gathered dtype must be one. 8-bit weights keep their scales in themselves.
    """
    stored = param.cls in PACKED and param.cls != "Int8Params" and param.dtype in STORED_AS
    return stored and gathered_as in (None, param.dtype)
