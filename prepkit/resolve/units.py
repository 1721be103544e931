"""Which modules become units, and what is left out of them: what FSDP1 and FSDP2 have in common.

Sums on config and facts that rules and planner share. Every function is linear in modules and parameters.
"""

from __future__ import annotations

from prepkit.config import FSDP1, FSDP2, Config, Mixed
from prepkit.facts import ModelFacts
from prepkit.resolve.modules import BATCH_NORM, bottom_up, matcher, parent


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
