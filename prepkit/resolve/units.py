"""Which modules become units of FSDP1 and FSDP2, what is left out of them, and how parameters lie in them.

Sums on config and facts that rules and planner share. Every function is linear in modules and parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping

from prepkit.config import FSDP1, FSDP2, Config, Mixed
from prepkit.facts import ModelFacts, ParamFact
from prepkit.plan.layout import FlatPart, flatten, itemsize
from prepkit.resolve.engines import engine_of
from prepkit.resolve.modules import BATCH_NORM, PACKED, bottom_up, matcher, packed_params, parent
from prepkit.steps import Axis


def every_batch_norm(model: ModelFacts) -> frozenset[str]:
    """Paths of all batch norms below the root, synchronised ones and subclasses included (torch ``_BatchNorm``)."""
    kinds = {index for index, cls in enumerate(model.classes) if BATCH_NORM in (cls.name, *cls.mro)}
    return frozenset(module.path for module in model.modules if module.cls in kinds and module.path)


def full_precision_units(cfg: Config, model: ModelFacts) -> frozenset[str]:
    """Batch norms that stay in float32 in units of their own, because the others compute in 16 bits (pain 40)."""
    return every_batch_norm(model) if isinstance(cfg.precision, Mixed) else frozenset()


def ignored_modules(engine: FSDP1 | FSDP2, model: ModelFacts) -> tuple[str, ...]:
    """Paths of the outermost modules that match ``engine.ignored``, in module order; never the root."""
    matched = matcher(engine.ignored)
    inside: set[str] = set()
    outermost: list[str] = []
    for module in model.modules if engine.ignored else ():
        if module.path and parent(module.path) in inside:
            inside.add(module.path)
        elif module.path and matched(module.path):
            inside.add(module.path)
            outermost.append(module.path)
    return tuple(outermost)


def _inside(roots: tuple[str, ...], model: ModelFacts) -> frozenset[str]:
    """The modules at these paths and all inside them."""
    inside: set[str] = set(roots)
    for module in model.modules if roots else ():
        if module.path and parent(module.path) in inside:
            inside.add(module.path)
    return frozenset(inside)


def ignored_params(engine: FSDP1 | FSDP2, model: ModelFacts) -> frozenset[str]:
    """Names of the parameters of ignored modules; a tied one is ignored wherever it is (torch _get_ignored_params)."""
    modules = _inside(ignored_modules(engine, model), model)
    names = {param.name for param in model.params if parent(param.name) in modules} if modules else set()
    for group in model.ties if modules else ():
        if any(parent(name) in modules for name in group):
            names.update(group)
    return frozenset(names)


def sharded_units(cfg: Config, model: ModelFacts, selected: tuple[str, ...]) -> tuple[str, ...]:
    """Paths of the units below the root, children before parents: the selection without what is ignored.

    Where units compute in 16 bits each batch norm becomes a unit too, so that it can stay in float32.
    """
    assert isinstance(cfg.engine, FSDP1 | FSDP2), "only they have units"
    chosen = set(selected) | full_precision_units(cfg, model)
    return bottom_up(model, chosen - _inside(ignored_modules(cfg.engine, model), model))


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
