"""A planner that drops one setting: whoever cites a test as the proof of a setting can see that test fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, get_args

from attrs import NOTHING, evolve, frozen, has
from returns.result import Failure

from prepkit import planner
from prepkit.codec import field_types
from prepkit.config import Config, ShardLoaders, TPLayer
from prepkit.facts import Facts
from prepkit.plan import Plan
from prepkit.resolve.resolved import Resolved


@frozen
class Setting:
    """A setting that is not at its default, and what the plan then has at a place."""

    name: str
    """``Class.field``."""
    asked: Config
    facts: Facts
    place: str
    """Where it arrives: a step kind, ``owners``, ``run`` or ``layout``, then fields. Of a kind it is the first step, of
    a tuple the item with that index, path or name. ``kinds`` are the kinds of all steps; ``overridden`` and
    ``refused by`` the ids of findings."""
    value: object


ACTIVE: list[str] = []
"""The setting that is dropped just now, if any: a gang drops it in its workers too."""


class NotPlannedError(Exception):
    """There is no plan, or nothing at the place."""


def planned(setting: Setting) -> object:
    """What the plan has at the place."""
    made = planner.plan(setting.asked, setting.facts)
    if isinstance(made, Failure) and setting.place == "refused by":
        return tuple(one.rule for one in made.failure())
    if isinstance(made, Failure):
        raise NotPlannedError("\n".join(str(one) for one in made.failure()))
    return found(made.unwrap(), setting.place)


def found(plan: Plan, place: str) -> object:
    """The value at a place of a plan; see ``Setting``."""
    first, *rest = place.split(".")
    match first:
        case "kinds":
            value: object = tuple(type(one.step).__name__ for one in plan.steps)
        case "owners" | "layout" | "run":
            value = getattr(plan, first)
        case "overridden":
            value = tuple(one.rule for one in plan.overridden)
        case kind:
            value = next((one.step for one in plan.steps if type(one.step).__name__ == kind), NOTHING)
    for name in rest:
        value = _inside(value, name)
    if value is NOTHING:
        raise NotPlannedError(f"the plan has no {place}")
    return value


def _inside(value: object, name: str) -> object:
    if not isinstance(value, tuple):
        return getattr(value, name, NOTHING)
    if name.isdigit():
        return value[int(name)] if int(name) < len(value) else NOTHING
    named = (one for one in value if name in (getattr(one, "name", None), "/".join(getattr(one, "path", ()))))
    return next((one.value for one in named), NOTHING)


INSTEAD: dict[str, object] = {
    "WrapClasses.names": ("Linear",),
    "WrapPaths.patterns": ("norm",),
    "WrapSize.min_params": 1,
    "TPPlan.layers": (TPLayer("head", "colwise"),),
    "TPLayer.pattern": "head",
    "TPLayer.style": "rowwise",
    "CompileOption.name": "another",
    "CompileOption.value": "another",
    "LoadWeights.path": "nowhere",
    "Group.names": (),
    "ClipNorm.max_norm": 99.0,
    "ClipValue.max_value": 99.0,
    "EachLoader.choices": (ShardLoaders(),),
}
"""What a planner reads that drops a setting without a default."""


def dropped(value: Any, name: str) -> Any:
    """The value with a setting at its default, wherever its class is met."""
    if isinstance(value, tuple):
        return type(value)(dropped(one, name) for one in value)
    if not has(type(value)):
        return value
    changed: dict[str, object] = {}
    for field in field_types.fields(type(value)):
        key = f"{type(value).__name__}.{field.name}"
        default = INSTEAD[key] if field.default is NOTHING and key == name else field.default
        old = getattr(value, field.name)
        new = default if key == name else dropped(old, name)
        if new is not old:
            changed[field.name] = new
    return evolve(value, **changed) if changed else value


@contextmanager
def dropping(name: str) -> Iterator[Counter[str]]:
    """Rules and planner read a setting as its default; counts how often it was another."""
    met: Counter[str] = Counter()
    made, split = Resolved.__init__, planner.split

    def less(cfg: Config) -> Config:
        out = dropped(cfg, name)
        met[name] += out != cfg
        return out

    def resolved(self: Resolved, *, cfg: Config, facts: Facts) -> None:
        made(self, cfg=less(cfg), facts=facts)

    Resolved.__init__ = resolved  # type: ignore[method-assign]
    planner.split = lambda cfg, *rest: split(less(cfg), *rest)  # type: ignore[attr-defined]
    ACTIVE.append(name)
    try:
        yield met
    finally:
        ACTIVE.pop()
        Resolved.__init__ = made  # type: ignore[method-assign]
        planner.split = split  # type: ignore[attr-defined]


@cache
def settings_of(cls: Any = Config) -> frozenset[str]:
    """``Class.field`` of every class that a config may hold."""
    if not (isinstance(cls, type) and has(cls)):
        return frozenset(name for inner in get_args(cls) for name in settings_of(inner))
    fields = field_types.fields(cls)
    below = (settings_of(field.type) for field in fields)
    return frozenset({f"{cls.__name__}.{field.name}" for field in fields}).union(*below)


def under_dropped(rank: int, world: int, name: str, function: Callable[..., Any], *args: Any) -> Any:
    """What a worker of a gang runs for a test that drops a setting."""
    with dropping(name):
        return function(rank, world, *args)
