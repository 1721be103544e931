"""Which parameters each optimizer of the config steps, and with which options."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fnmatch import translate

from attrs import frozen

from prepkit.config import Config
from prepkit.config.optimizer import OPTIMIZERS, Group, OptimizerSpec, specs
from prepkit.facts import ModelFacts, ParamFact


@frozen(kw_only=True)
class CreatedGroup:
    """One group of an optimizer that is created."""

    names: tuple[str, ...]
    """Trained parameters, in the model's order."""
    said: Group
    """The group of the config."""


@frozen(kw_only=True)
class CreatedOptimizer:
    """One optimizer that is created."""

    spec: OptimizerSpec
    where: str
    """Its place in the config."""
    rest: tuple[str, ...]
    """The trained parameters that have its own options, in the model's order."""
    groups: tuple[CreatedGroup, ...]
    """Those with options of their own, group by group."""

    @property
    def names(self) -> tuple[str, ...]:
        """All parameters that it steps."""
        return (*self.rest, *(name for group in self.groups for name in group.names))


def created_optimizers(cfg: Config, model: ModelFacts) -> tuple[CreatedOptimizer, ...]:
    """Every optimizer of the config with its parameters: first those with ``names``, then the others take what is left.

    What two of them name goes to the first; a parameter that two groups name is in the first. Rules refuse both.
    """
    trained = tuple(param for param in model.params if param.requires_grad)
    asked = specs(cfg.optimizer)
    taken: dict[int, tuple[str, ...]] = {}
    left = trained
    for index in sorted(range(len(asked)), key=lambda i: not asked[i].names):
        own = set(takes(asked[index], left))
        taken[index] = tuple(param.name for param in trained if param.name in own)
        left = tuple(param for param in left if param.name not in own)
    several = isinstance(cfg.optimizer, tuple)
    return tuple(
        _created(spec, f"config.optimizer[{index}]" if several else "config.optimizer", taken[index])
        for index, spec in enumerate(asked)
    )


def takes(spec: OptimizerSpec, params: tuple[ParamFact, ...]) -> Iterator[str]:
    """Names of those that the spec's patterns mean; all of them where it has none. Matrices only, for some."""
    means = named(spec.names) if spec.names else lambda _: True
    only_matrices = OPTIMIZERS[type(spec)].only_matrices
    return (param.name for param in params if means(param.name) and not (only_matrices and len(param.shape) != 2))


def named(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Return whether a parameter's name matches one of the patterns; ``*`` and ``?`` stand for dots too.

    >>> means = named(("*.bias", "*norm*"))
    >>> means("layers.0.mlp.bias"), means("layers.0.norm.weight"), means("head.weight")
    (True, True, False)
    """
    test = re.compile("|".join(map(translate, patterns)) or r"(?!)").match
    return lambda name: test(name) is not None


def _created(spec: OptimizerSpec, where: str, names: tuple[str, ...]) -> CreatedOptimizer:
    left, groups = names, []
    for group in spec.groups:
        means = named(group.names)
        groups.append(CreatedGroup(names=tuple(filter(means, left)), said=group))
        left = tuple(name for name in left if not means(name))
    return CreatedOptimizer(spec=spec, where=where, rest=left, groups=tuple(groups))
