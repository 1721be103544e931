"""Which modules FSDP1 wraps, what each flat parameter holds, and in which dtype it is stored.

Sums on config and facts that rules and planner share. Every function is linear in modules and parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping

from prepkit.config import FSDP1, Config, Mixed
from prepkit.facts import ModelFacts, ParamFact
from prepkit.resolve.modules import BATCH_NORM, bottom_up, matcher, parent


def every_batch_norm(model: ModelFacts) -> frozenset[str]:
    """Paths of all batch norms below the root, synchronised ones and subclasses included (torch ``_BatchNorm``)."""
    kinds = {index for index, cls in enumerate(model.classes) if BATCH_NORM in (cls.name, *cls.mro)}
    return frozenset(module.path for module in model.modules if module.cls in kinds and module.path)


def ignored_modules(engine: FSDP1, model: ModelFacts) -> tuple[str, ...]:
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


def ignored_params(engine: FSDP1, model: ModelFacts) -> frozenset[str]:
    """Names of the parameters of ignored modules; a tied one is ignored wherever it is (torch _get_ignored_params)."""
    modules = _inside(ignored_modules(engine, model), model)
    names = {param.name for param in model.params if parent(param.name) in modules} if modules else set()
    for group in model.ties if modules else ():
        if any(parent(name) in modules for name in group):
            names.update(group)
    return frozenset(names)


def flat_units(cfg: Config, model: ModelFacts, selected: tuple[str, ...]) -> tuple[str, ...]:
    """Paths of the FSDP1 units below the root, children before parents: the selection without what is ignored.

    Where units compute in 16 bits each batch norm becomes a unit too, so that it can stay in float32 (pain 40).
    """
    assert isinstance(cfg.engine, FSDP1), "only FSDP1 has flat units"
    chosen = set(selected)
    if isinstance(cfg.precision, Mixed):
        chosen |= every_batch_norm(model)
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
