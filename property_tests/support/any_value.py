"""Values of any type of the vocabulary, drawn from the types of its fields alone: shapes without sense.

Plans that make sense come from ``prepkit.testing``; the codec and the diff must serve all of them.
"""

from __future__ import annotations

from functools import cache, reduce
from types import NoneType
from typing import Any, get_args

import attrs
from hypothesis import strategies as st

from prepkit.codec import field_types as codec_shapes
from prepkit.facts import Env
from prepkit.plan import Plan

SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(1 - 2**64, 2**64 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(max_size=4) | st.sampled_from(["kind", "model.layers.0", "$", '"', "\\ud800", "\x00"]),
    NoneType: st.none(),
}

# What a class refuses when it is made cannot stand in a plan.
FIELDS: dict[tuple[type, str], st.SearchStrategy[Any]] = {
    (Env, "world_size"): st.integers(1 - 2**31, 2**31 - 1),
    (Env, "per_node"): st.none() | st.integers(1, 2**31 - 1),
    (Env, "memory"): st.none() | st.integers(0, 2**62),
    (Env, "host_memory"): st.none() | st.integers(0, 2**62),
    (Env, "capability"): st.none() | st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
}

CLASSES = tuple(sorted((cls for cls in codec_shapes.types() if attrs.has(cls)), key=lambda cls: cls.__name__))

MODULES = tuple(sorted({cls.__module__ for cls in CLASSES}))


def classes(module: str) -> st.SearchStrategy[type]:
    """Any class of one file of the vocabulary."""
    return st.sampled_from([cls for cls in CLASSES if cls.__module__ == module])


def values(cls: Any) -> st.SearchStrategy[Any]:
    """Any value of this type; tuples stay short."""
    return _values(cls)


@cache
def _values(cls: Any) -> st.SearchStrategy[Any]:
    if cls in SCALARS:
        return SCALARS[cls]
    if codec_shapes.is_choice(cls):
        return st.sampled_from(list(get_args(cls) or cls))
    if codec_shapes.is_union(cls):
        return st.one_of([values(member) for member in get_args(cls)])
    if codec_shapes.is_tuple(cls):
        items = get_args(cls)
        return (
            st.lists(values(items[0]), max_size=2).map(tuple) if Ellipsis in items else st.tuples(*map(values, items))
        )
    return _built(cls)


@st.composite
def _built(draw: st.DrawFn, cls: Any) -> Any:
    """Not ``st.builds``: it keeps how each of the thousand values inside was made, for minutes of printing."""
    return cls(**{field.name: draw(_of_field(cls, field)) for field in codec_shapes.fields(cls)})


def _of_field(cls: Any, field: Any) -> st.SearchStrategy[Any]:
    bounded = FIELDS.get((cls, field.name))
    return values(field.type) if bounded is None else bounded


@st.composite
def neighbours(draw: st.DrawFn, cls: Any) -> tuple[Any, Any]:
    """Two values of a class that differ in at most one field, at any depth."""
    value = draw(values(cls))
    return value, _changed(draw, value, cls)


def _changed(draw: Any, value: Any, cls: Any) -> Any:
    """The value with another draw in one place: here, or in a field, or in an item."""
    if attrs.has(type(value)) and codec_shapes.fields(type(value)) and draw(st.integers(0, 3)):
        field = draw(st.sampled_from(list(codec_shapes.fields(type(value)))))
        return attrs.evolve(value, **{field.name: _changed_field(draw, value, field)})
    if isinstance(value, tuple) and value and codec_shapes.is_tuple(cls) and draw(st.booleans()):
        at = draw(st.integers(0, len(value) - 1))
        item = get_args(cls)[0 if Ellipsis in get_args(cls) else at]
        return (*value[:at], _changed(draw, value[at], item), *value[at + 1 :])
    return draw(values(cls))


def _changed_field(draw: Any, value: Any, field: Any) -> Any:
    if (bounded := FIELDS.get((type(value), field.name))) is not None:
        return draw(bounded)
    return _changed(draw, getattr(value, field.name), field.type)


@st.composite
def plan_pairs(draw: st.DrawFn) -> tuple[Plan, Plan]:
    """Two plans, a few changes apart; or two that have nothing in common."""
    a = draw(values(Plan))
    b = reduce(lambda plan, _: _changed(draw, plan, Plan), range(draw(st.integers(1, 3))), a)
    mixed = draw(st.permutations(a.steps + draw(st.sampled_from([(), a.steps, b.steps]))))
    return a, draw(st.sampled_from([b, attrs.evolve(b, steps=tuple(mixed))]))
