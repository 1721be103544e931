"""Which modules FSDP1 wraps, what each flat parameter holds, and in which dtype it is stored.

Sums on config and facts that rules and planner share. Every function is linear in modules and parameters.
"""

from __future__ import annotations

from collections import defaultdict
from typing import assert_never

from prepkit.config import DDP, FSDP1, FSDP2, XLA, Config, DeepSpeed, Mixed, Single, TensorParallel
from prepkit.facts import ModelFacts, ParamFact
from prepkit.resolve.fsdp2 import unit_paths
from prepkit.resolve.modules import bottom_up, matcher, parent, select, unit_of


def batch_norms(model: ModelFacts) -> frozenset[str]:
    """Paths of all batch norms below the root, subclasses included (torch ``_BatchNorm``)."""
    kinds = {index for index, cls in enumerate(model.classes) if "_BatchNorm" in (cls.name, *cls.mro)}
    return frozenset(module.path for module in model.modules if module.cls in kinds and module.path)


def ignored_modules(engine: FSDP1, model: ModelFacts) -> tuple[str, ...]:
    """Paths of the outermost modules that match ``engine.ignored``, in module order; never the root."""
    matched = matcher(engine.ignored)
    inside: set[str] = set()
    found: list[str] = []
    for module in model.modules if engine.ignored else ():
        if module.path and parent(module.path) in inside:
            inside.add(module.path)
        elif module.path and matched(module.path):
            inside.add(module.path)
            found.append(module.path)
    return tuple(found)


def _inside(roots: tuple[str, ...], model: ModelFacts) -> frozenset[str]:
    """The modules at these paths and all inside them."""
    found: set[str] = set(roots)
    for module in model.modules if roots else ():
        if module.path and parent(module.path) in found:
            found.add(module.path)
    return frozenset(found)


def ignored_params(engine: FSDP1, model: ModelFacts) -> frozenset[str]:
    """Names of the parameters of ignored modules; a tied one is ignored wherever it is (torch _get_ignored_params)."""
    modules = _inside(ignored_modules(engine, model), model)
    found = {param.name for param in model.params if parent(param.name) in modules}
    for group in model.ties if modules else ():
        if any(parent(name) in modules for name in group):
            found.update(group)
    return frozenset(found)


def flat_units(cfg: Config, model: ModelFacts) -> tuple[str, ...]:
    """Paths of the FSDP1 units below the root, children before parents: the selection without what is ignored.

    Where units compute in 16 bits each batch norm becomes a unit too, so that it can stay in float32 (pain 40).
    """
    assert isinstance(cfg.engine, FSDP1), "only FSDP1 has flat units"
    chosen = set(select(cfg.engine.wrap, model))
    if isinstance(cfg.precision, Mixed):
        chosen |= batch_norms(model)
    return bottom_up(model, chosen - _inside(ignored_modules(cfg.engine, model), model))


def sharded_units(cfg: Config, model: ModelFacts) -> tuple[str, ...]:
    """Paths of the units below the root, for every engine; none where nothing is sharded."""
    match cfg.engine:
        case FSDP1():
            return flat_units(cfg, model)
        case FSDP2():
            return unit_paths(cfg.engine, model)
        case Single() | DDP() | TensorParallel() | XLA() | DeepSpeed():
            return ()
        case _:
            assert_never(cfg.engine)


def members(cfg: Config, model: ModelFacts) -> dict[str, tuple[ParamFact, ...]]:
    """Path of every FSDP1 unit that holds a parameter to its parameters, in the order in which torch flattens them."""
    assert isinstance(cfg.engine, FSDP1), "only FSDP1 flattens"
    owner = unit_of(flat_units(cfg, model), model)
    left_out = ignored_params(cfg.engine, model)
    found: dict[str, list[ParamFact]] = defaultdict(list)
    for param in model.params:
        if param.name not in left_out:
            found[owner[param.name]].append(param)
    return {path: tuple(held) for path, held in found.items()}
