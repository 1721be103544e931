"""What the data form of a field's type looks like, and what to tell a user who wrote something else.

A type is an attrs class, a scalar, a ``Literal``, an enum, a tuple, or a union of these; fields hold nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import attrs

from prepkit.codec.text import shown
from prepkit.facts import Observation
from prepkit.plan import Plan
from prepkit.plan.attestation import Attestation

ROOTS = (Plan, Observation, Attestation)
"""Every class that has a data form is one of these or stands in a field below them."""

SCALARS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "null"}
"""What to call them."""


def is_choice(cls: Any) -> bool:
    """Whether only some texts are allowed: a ``Literal`` or an enum."""
    return get_origin(cls) is Literal or (isinstance(cls, type) and issubclass(cls, Enum))


def is_tuple(cls: Any) -> bool:
    """Whether the type is a tuple, which JSON has as a list."""
    return get_origin(cls) is tuple


def is_union(cls: Any) -> bool:
    """Whether the type is a union, ``X | Y`` or ``X | None``."""
    return get_origin(cls) in (Union, UnionType)


def choices(cls: Any) -> tuple[Any, ...]:
    """The texts that a ``Literal`` or a ``StrEnum`` allows, in their order."""
    return get_args(cls) or tuple(member.value for member in cls)


def kinds(union: Any) -> dict[str, type]:
    """Name to class of the members that are told apart by a tag; empty where at most one member is a class."""
    classes = {member.__name__: member for member in get_args(union) if attrs.has(member)}
    return classes if len(classes) > 1 else {}


def fields(cls: type) -> tuple[attrs.Attribute[Any], ...]:
    """The fields that are part of the value, with resolved types: what equality leaves out has no data form."""
    return tuple(field for field in attrs.fields(attrs.resolve_types(cls)) if field.eq)


@cache
def types() -> frozenset[Any]:
    """Every type that a value below ``ROOTS`` may have: the classes, and the types of their fields with all parts."""
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
    """The classes that are written with their tag: the members of all unions of classes."""
    return frozenset(member for cls in types() for member in kinds(cls).values())


def fits(cls: Any, value: object) -> bool:
    """Whether the JSON type of ``value`` is that of ``cls``, for a ``cls`` that is no union.

    A whole number is a number too; a bool is nothing but a bool.
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


# --- words ---------------------------------------------------------------------------------------------------------


def describe(cls: Any) -> str:
    """What a user has to write for a value of this type.

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


_WORD = 200
"""Characters of a word that are compared: what is longer is no misspelling."""


def nearest(word: str, options: Iterable[str], cutoff: float = 0.6) -> str:
    """The option that was probably meant, or an empty string.

    >>> nearest("fsdp", ("Single", "DDP", "FSDP2"))
    'FSDP2'
    """
    known = {option.lower(): option for option in options}
    close = get_close_matches(word[:_WORD].lower(), known, n=1, cutoff=cutoff)
    return known[close[0]] if close else ""


def retyped(value: object, cls: Any) -> str:
    """What to type instead of a value of the wrong type: the same value in the right one, where that can be told."""
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


def listed(value: object, cls: Any) -> list[object]:
    """The value as the one item of a list, where one of its type is expected and it is short; else empty."""
    options = get_args(cls) if is_union(cls) else (cls,)
    fitting = any(is_tuple(option) and fits(get_args(option)[0], value) for option in options)
    return [value] if fitting and len(repr(value)) <= _WORD else []


def _number(text: str, cls: type[int] | type[float]) -> int | float | None:
    try:
        number = cls(text)
        return number if math.isfinite(number) else None
    except (ValueError, OverflowError):
        return None
