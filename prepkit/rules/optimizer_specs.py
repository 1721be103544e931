"""The optimizers that the config asks for: which parameters their patterns mean, and the options of their groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from attrs import fields

from prepkit.config import FP8, MSAMP, Config, DeepSpeed
from prepkit.config.optimizer import OPTIMIZERS, SELECTS, Group, OptimizerSpec, options
from prepkit.facts import ParamFact
from prepkit.findings import Severity
from prepkit.findings.text import count, some
from prepkit.resolve.created_optimizers import named, takes
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule


def _trained(resolved: Resolved) -> tuple[ParamFact, ...]:
    return tuple(param for param in resolved.facts.model.params if param.requires_grad)


def _places(resolved: Resolved) -> Iterator[tuple[str, OptimizerSpec | Group]]:
    """Every optimizer and every group of the config with its place."""
    for made in resolved.created_optimizers:
        yield made.where, made.spec
        yield from ((f"{made.where}.groups[{index}]", group) for index, group in enumerate(made.spec.groups))


def _unmatched(resolved: Resolved) -> Iterator[Hit]:
    names = [param.name for param in _trained(resolved)]
    for where, of in _places(resolved):
        for pattern in of.names:
            if not any(map(named((pattern,)), names)):
                yield Hit(f"{where}.names", f"`{pattern}` matches no trained parameter. There are {some(names)}.")
        if isinstance(of, Group) and not of.names:
            yield Hit(f"{where}.names", "A group without patterns has no parameters.")


def _twice(resolved: Resolved) -> Iterator[Hit]:
    for made in resolved.created_optimizers:
        yield from _overlap(made.where, "groups", made.spec.groups, made.names)
    trained = _trained(resolved)
    claims: dict[str, list[int]] = defaultdict(list)
    for index, made in enumerate(resolved.created_optimizers):
        for name in takes(made.spec, trained) if made.spec.names else ():
            claims[name].append(index)
    twice = [name for name, at in claims.items() if len(at) > 1]
    if twice:
        at = " and ".join(f"config.optimizer[{index}]" for index in claims[twice[0]])
        yield Hit("config.optimizer", f"{at} both name {some(twice)}.")


def _overlap(where: str, field: str, groups: tuple[Group, ...], names: tuple[str, ...]) -> Iterator[Hit]:
    means = [named(group.names) for group in groups]
    for name in names:
        at = [index for index, own in enumerate(means) if own(name)]
        if len(at) > 1:
            also = sum(sum(own(other) for own in means) > 1 for other in names) - 1
            more = f" and {count(also, 'other parameter')} are" if also else " is"
            yield Hit(f"{where}.{field}", f"`{name}`{more} in groups {' and '.join(map(str, at))}.")
            return


def _nothing(resolved: Resolved) -> Iterator[Hit]:
    trained = _trained(resolved)
    for made in resolved.created_optimizers if trained else ():
        if not made.names:
            kind, only = type(made.spec).__name__, OPTIMIZERS[type(made.spec)].only_matrices
            why = "no matrix is left for it" if only else "the other optimizers step every trained parameter"
            if not any(takes(made.spec, trained)):
                why = "its patterns mean no matrix" if only else "its patterns mean no trained parameter"
            yield Hit(made.where, f"{kind} would have no parameters: {why}.")


def _unclaimed(resolved: Resolved) -> Iterator[Hit]:
    if not resolved.created_optimizers or not resolved.trains:
        return
    claimed = {name for made in resolved.created_optimizers for name in made.names}
    left = [param.name for param in _trained(resolved) if param.name not in claimed]
    if left:
        whole = [type(m.spec).__name__ for m in resolved.created_optimizers if OPTIMIZERS[type(m.spec)].only_matrices]
        why = f" {whole[0]} steps matrices only." if whole else ""
        what = (
            f"{count(len(left), 'trainable parameter')} in none of the optimizers, so never updated: {some(left)}.{why}"
        )
        yield Hit("config.optimizer", what)


def _foreign_option(resolved: Resolved) -> Iterator[Hit]:
    for made in resolved.created_optimizers:
        known = [field.name for field in fields(type(made.spec)) if field.name not in SELECTS]
        for index, group in enumerate(made.spec.groups):
            foreign = [name for name in options(group) if name not in known]
            if foreign:
                what = f"{type(made.spec).__name__} has no {', '.join(foreign)}: torch would not look at it."
                yield Hit(f"{made.where}.groups[{index}].{foreign[0]}", what)


def takes_one(cfg: Config) -> str:
    """Who takes a single optimizer only; empty where several are taken."""
    if isinstance(cfg.engine, DeepSpeed):
        return "DeepSpeed"
    return "MS-AMP" if isinstance(cfg.precision, FP8) and isinstance(cfg.precision.backend, MSAMP) else ""


def _several(resolved: Resolved) -> Iterator[Hit]:
    given, who = resolved.facts.optimizer, takes_one(resolved.cfg)
    number = max(len(resolved.created_optimizers), len(given.classes) if given else 0)
    if who and number > 1:
        where = "optimizer" if given else "config.optimizer"
        yield Hit(where, f"{who} steps one optimizer, and there are {number}.")


RULES: tuple[Rule, ...] = (
    Rule(
        id="optimizer.several",
        summary="There are several optimizers only where the engine steps several.",
        check=_several,
        fix="Give one, with groups of its own options, or write engine=FSDP2() or engine=DDP().",
        overridable=False,
        source=("deepspeed.initialize", "pain 13"),
    ),
    Rule(
        id="optimizer.pattern",
        summary="Every pattern of an optimizer and of a group matches a trained parameter.",
        check=_unmatched,
        fix="Write a pattern of parameter names in which * stands for any characters, dots too, such as *.bias.",
        severity=Severity.WARNING,
        source=("pain 13",),
    ),
    Rule(
        id="optimizer.matched-twice",
        summary="No parameter is in two groups, or named by two optimizers.",
        check=_twice,
        fix="Make the patterns narrower, so that each parameter is matched once.",
        source=("G-5", "G-57"),
    ),
    Rule(
        id="optimizer.empty",
        summary="Every optimizer that is asked for has parameters.",
        check=_nothing,
        fix="Leave it out, or write names=(...) that mean trained parameters.",
        overridable=False,
        source=("torch.optim.Optimizer.__init__",),
    ),
    Rule(
        id="optimizer.unclaimed",
        summary="Every trainable parameter is stepped by one of the optimizers that are asked for.",
        check=_unclaimed,
        fix="Add an optimizer without names, such as AdamW(), which takes what is left, or freeze the parameters.",
        source=("pain 1",),
    ),
    Rule(
        id="optimizer.group-option",
        summary="Groups set options that their optimizer has.",
        check=_foreign_option,
        fix="Remove it, or write it for an optimizer that has it.",
        overridable=False,
        source=("torch.optim.Optimizer.add_param_group",),
    ),
)
"""Reporting order: the engine, the patterns, what they lead to, the options."""
