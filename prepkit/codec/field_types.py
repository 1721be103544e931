"""The data form of each field's type, and what to tell a user who wrote something else.

A type is an attrs class, a scalar, a ``Literal``, an enum, a tuple, or a union of these; fields hold nothing else.
"""

from __future__ import annotations

import math
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import attrs

from prepkit.codec.languages import TAG
from prepkit.codec.text import shown
from prepkit.config import CheckpointBlocks, OffloadToCPU
from prepkit.facts import Observation
from prepkit.plan import Plan
from prepkit.plan.attestation import Attestation

ROOTS = (Plan, Observation, Attestation)
"""Every class with a data form is one of these, or the type of a field below them."""

SCALARS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "null"}
"""Scalars to their names in messages."""


def is_choice(cls: Any) -> bool:
    """Tell a type that allows only some texts: a ``Literal`` or an enum."""
    return get_origin(cls) is Literal or (isinstance(cls, type) and issubclass(cls, Enum))


def is_tuple(cls: Any) -> bool:
    """Tell a tuple, which is a list in JSON."""
    return get_origin(cls) is tuple


def is_union(cls: Any) -> bool:
    """Tell a union, ``X | Y`` or ``X | None``."""
    return get_origin(cls) in (Union, UnionType)


def choices(cls: Any) -> tuple[Any, ...]:
    """List the texts that a ``Literal`` or a ``StrEnum`` allows, in order."""
    return get_args(cls) or tuple(member.value for member in cls)


ALONE = (CheckpointBlocks, OffloadToCPU)
"""Classes with a tag though theirs is the only one beside None: what a file asks for is read by its name."""


def kinds(union: Any) -> dict[str, type]:
    """Map the names of the members that a tag tells apart to their classes; empty for a single class without a tag."""
    classes = {member.__name__: member for member in get_args(union) if attrs.has(member)}
    return classes if len(classes) > 1 or not set(ALONE).isdisjoint(classes.values()) else {}


def options(cls: Any) -> tuple[Any, ...]:
    """List the types that a value may have: of a union its members, and beside a list of objects those objects too."""
    found: list[Any] = []
    for member in get_args(cls) if is_union(cls) else (cls,):
        items = [one for item in get_args(member) for one in options(item)] if is_tuple(member) else []
        found += (member, *(one for one in items if attrs.has(one)))
    return tuple(dict.fromkeys(found))


def within(cls: Any, name: str) -> tuple[Any, ...]:
    """List the types of a setting of this name in the values of a type; empty where none of them has it."""
    objects = [one for one in options(cls) if attrs.has(one)]
    if name == TAG and (known := tuple(one.__name__ for one in objects if one in tagged())):
        return (Literal[known],)
    return tuple(field.type for one in objects for field in fields(one) if field.name == name)


def names_within(cls: Any) -> tuple[str, ...]:
    """List what values of a type have inside, in order; empty for what is no object."""
    objects = [one for one in options(cls) if attrs.has(one)]
    kind = (TAG,) if any(one in tagged() for one in objects) else ()
    return tuple(dict.fromkeys((*kind, *(field.name for one in objects for field in fields(one)))))


def takes_none(cls: Any) -> bool:
    """Tell a type that None is a value of."""
    return NoneType in get_args(cls)


def fields(cls: type) -> tuple[attrs.Attribute[Any], ...]:
    """List the fields with a data form, their types resolved; what equality leaves out has none."""
    return tuple(field for field in attrs.fields(attrs.resolve_types(cls)) if field.eq)


@cache
def types() -> frozenset[Any]:
    """Collect every type that a value below ``ROOTS`` may have: classes, and all types of their fields."""
    seen: set[Any] = set()
    rest: list[Any] = list(ROOTS)
    while rest:
        cls = rest.pop()
        if cls not in seen:
            seen.add(cls)
            rest.extend(get_args(cls))
            rest.extend(field.type for field in (fields(cls) if attrs.has(cls) else ()))
    return frozenset(seen)


@cache
def tagged() -> frozenset[type]:
    """Collect the classes that are written with their tag: the members of all unions of classes."""
    return frozenset(member for cls in types() for member in kinds(cls).values())


def fits(cls: Any, value: object) -> bool:
    """Check that the JSON type of ``value`` is that of ``cls``, which is not a union.

    A whole number is a number too; a bool is only a bool.
    """
    match value:
        case None:
            return cls is NoneType
        case bool():
            return cls is bool
        case int():
            return cls in (int, float)
        case float():
            return cls is float
        case str():
            return cls is str or is_choice(cls)
        case list():
            return is_tuple(cls)
        case _:
            return attrs.has(cls) and isinstance(value, dict)


def may_be(cls: Any, value: object) -> bool:
    """Check that a value of ``cls``, which is not a union, may be told by this in JSON: an object by its kind alone."""
    if is_tuple(cls):
        items = [item for item in get_args(cls) if item is not Ellipsis]
        if not isinstance(value, list) or (Ellipsis not in get_args(cls) and len(value) != len(items)):
            return False
        each = items * len(value) if Ellipsis in get_args(cls) else items
        return all(any(may_be(one, item) for one in options(kind)) for kind, item in zip(each, value, strict=True))
    if attrs.has(cls):
        return cls in tagged() and value == cls.__name__
    return value in choices(cls) if is_choice(cls) else fits(cls, value)


# --- words ---------------------------------------------------------------------------------------------------------


def describe(cls: Any) -> str:
    """Describe what a user has to write for a value of this type.

    >>> describe(bool | int), describe(tuple[float, float]), describe(tuple[str, ...])
    ('true or false or a whole number', 'a list (a number, a number)', 'a list (of text)')
    """
    if cls in SCALARS:
        return SCALARS[cls]
    if is_choice(cls):
        return " or ".join(map(repr, choices(cls)))
    if is_union(cls):
        named = kinds(cls)
        plain = [describe(member) for member in get_args(cls) if member not in named.values()]
        return " or ".join(([f"an object of kind {', '.join(named)}"] if named else []) + plain)
    if is_tuple(cls):
        items = [describe(item) for item in get_args(cls) if item is not Ellipsis]
        return f"a list ({'of ' if Ellipsis in get_args(cls) else ''}{', '.join(items)})"
    return f"an object with the keys of {cls.__name__}"


def retyped(value: object, cls: Any) -> str:
    """Say what to type instead of a value of the wrong type: the same value in the right type, if there is one."""
    options = get_args(cls) if is_union(cls) else (cls,)
    if isinstance(value, str):
        if bool in options and value.lower() in ("true", "false"):
            return f"write {value.lower()} without quotes"
        for number in (int, float):
            if number in options and (read := _number(value, number)) is not None:
                return f"write {read} without quotes"
    if isinstance(value, float) and value.is_integer() and int in options:
        return f"write {shown(int(value))}"
    return f"write {describe(cls)}"


_LONG = 200
"""Letters of a value that a message repeats at most."""


def listed(value: object, cls: Any) -> list[object]:
    """Put a short value into a list, if a list of its type is expected; else return an empty list."""
    options = get_args(cls) if is_union(cls) else (cls,)
    endless = (option for option in options if is_tuple(option) and Ellipsis in get_args(option))
    fitting = any(fits(get_args(option)[0], value) for option in endless)
    return [value] if fitting and len(repr(value)) <= _LONG else []


def _number(text: str, cls: type[int] | type[float]) -> int | float | None:
    try:
        number = cls(text)
        return number if math.isfinite(number) else None
    except (ValueError, OverflowError):
        return None
