"""Strategies for the optimizers that a config asks for: anything that the types allow, and what suits a model."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, get_args, get_origin

from attrs import evolve, fields, resolve_types
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from prepkit import config as c
from prepkit.config import Config
from prepkit.config.optimizer import OPTIMIZERS, SELECTS
from prepkit.facts import Facts
from prepkit.resolve.optimizer_table import FAILS, places
from prepkit.rules.optimizer import takes_one

_SEVERAL = st.sampled_from((False, False, True))


@cache
def optimizer_specs() -> SearchStrategy[c.OptimizerSpec]:
    """Every spec with all of its options, with numbers out of range and patterns that match nothing."""
    return st.one_of(*(_spec(kind, invalid=True) for kind in OPTIMIZERS))


@cache
def several_optimizers() -> SearchStrategy[tuple[c.OptimizerSpec, ...]]:
    """Two of any kind, whose patterns know nothing of each other."""
    return st.lists(optimizer_specs(), min_size=2, max_size=2).map(tuple)


@st.composite
def optimizers_for(draw: st.DrawFn, facts: Facts, around: Config) -> c.OptimizerSpec | tuple[c.OptimizerSpec, ...]:
    """One that trains under the engine of ``around`` as it does alone, or two that divide the parameters.

    Some have a group of parameters with other options.
    """
    fails = {key.removeprefix("torch.") for key, row in FAILS.items() if any(place in row for place in places(around))}
    kinds = [kind for kind in OPTIMIZERS if kind.__name__ not in fails and facts.env.release >= OPTIMIZERS[kind].since]
    trained = [param for param in facts.model.params if param.requires_grad]
    flat = isinstance(around.engine, c.FSDP1) and not around.engine.use_orig_params
    rest = draw(_grouped([kind for kind in kinds if not OPTIMIZERS[kind].only_matrices], [p.name for p in trained]))
    matrices = [param.name for param in trained if len(param.shape) == 2]
    first = [kind for kind in kinds if OPTIMIZERS[kind].only_matrices]
    if not first or takes_one(around) or not 0 < len(matrices) < len(trained) or not draw(_SEVERAL):
        return evolve(rest, groups=()) if flat else rest  # a flat parameter is in one group
    own = draw(_grouped(first, matrices))
    return (evolve(own, names=tuple(matrices)), evolve(rest, names=(), groups=()))


@st.composite
def _grouped(draw: st.DrawFn, kinds: list[type], names: list[str]) -> c.OptimizerSpec:
    """One of these kinds for the parameters of these names, with a group of some of them or without."""
    kind = draw(st.sampled_from(kinds))
    spec = draw(_spec(kind, invalid=False))
    spec = evolve(spec, names=draw(st.sampled_from(((), ("*",)))))
    if draw(_SEVERAL):
        return spec
    known = {field.name for field in fields(kind)}
    rate, decay = st.none() | st.floats(0.0, 0.75), st.none() | st.floats(0.125, 0.75)
    options = {
        "lr": rate,
        "weight_decay": rate,
        "momentum": decay,
        "betas": st.none() | st.tuples(decay, decay).filter(all),
    }
    own: dict[str, Any] = {name: draw(drawn) for name, drawn in options.items() if name in known}
    some = draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
    return evolve(spec, groups=(c.Group(names=tuple(some), **own),))


@cache
def _spec(kind: type, *, invalid: bool) -> SearchStrategy[c.OptimizerSpec]:
    drawn = {
        field.name: _option(field.name, field.type, kind, invalid=invalid) for field in fields(resolve_types(kind))
    }
    if invalid:
        patterns = st.lists(st.sampled_from(("*norm*", "layers.*", "*", "no.*")), max_size=2).map(tuple)
        number, part = st.none() | st.floats(-0.5, 0.75), st.none() | st.floats(0.0, 0.75)
        betas = st.none() | st.tuples(st.floats(-0.5, 1.5), st.floats(0.0, 0.75))
        groups = st.builds(c.Group, names=patterns, lr=number, weight_decay=number, momentum=part, betas=betas)
        drawn["names"] = st.just(()) | patterns
        drawn["groups"] = st.just(()) | st.lists(groups, max_size=2).map(tuple)
    return st.builds(kind, **drawn)


def _option(name: str, kind: object, spec: type, *, invalid: bool) -> SearchStrategy[object]:
    """Any value of an option of this type, by the ranges that the spec's row says; nesterov comes with momentum."""
    least = 0.125 if name == "momentum" else 0.0
    number = st.floats(-0.5 if invalid else least, 0.75)
    if name in OPTIMIZERS[spec].up_to_zero:
        number = st.floats(-0.75, 0.5 if invalid else 0.0)
    if name in OPTIMIZERS[spec].from_one:
        number = st.floats(0.5 if invalid else 1.0, 2.0)
    if name in SELECTS:
        return st.just(())
    if kind is bool:
        return st.booleans()
    if kind is float:
        return number
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    return st.tuples(*(number for _ in get_args(kind)))
