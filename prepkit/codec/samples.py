"""What could stand in the place of data that does not fit: whole values, which a message shows as one types them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import attrs

from prepkit.codec import field_types
from prepkit.codec.languages import TAG, Untagged
from prepkit.findings.keywords import OTHER_NAMES

LONGEST = 200
"""Characters of a given value that a sample repeats; one that is longer is nobody's slip of the pen."""

MOST = 8
"""Samples of one message."""

OF_GROUPS = ("no_decay", "no_weight_decay", "param_groups", "groups", "params")
"""Keys by which other configs sort parameters into groups; here that is the optimizer's own."""


def samples(value: object, cls: Any) -> tuple[Any, ...]:
    """Data of the type that is near to what was given: the value in its place, then the kinds that need none."""
    members = tuple(field_types.kinds(cls).values())
    if not members:
        return tuple(_with_defaults(cls))
    given = value if len(repr(value)) <= LONGEST else None
    near = [one for member in members for one in _holding(given, member)]
    bare = [{TAG: member.__name__} for member in members if not _required(member)]
    return (*near, *bare)[:MOST]


def _with_defaults(cls: Any) -> Iterator[Untagged]:
    """The one class that may stand there with its defaults, where it has few fields and needs none."""
    for option in get_args(cls) if field_types.is_union(cls) else (cls,):
        if attrs.has(option) and not _required(option) and len(field_types.fields(option)) <= _FEW:
            held = _fields(option())
            if len(repr(held)) <= _SHORT:
                yield Untagged(option.__name__, held)


def _form(value: object) -> object:
    """A default as data."""
    return {TAG: type(value).__name__, **_fields(value)} if attrs.has(type(value)) else value


def _fields(value: Any) -> dict[str, object]:
    return {field.name: _form(getattr(value, field.name)) for field in field_types.fields(type(value))}


_FEW = 4
_SHORT = 100


def _holding(value: object, member: type) -> Iterator[dict[str, Any]]:
    """The member with the value in the one field that it cannot do without, or with the fields of an object."""
    required = _required(member)
    if isinstance(value, dict):
        names = {field.name for field in field_types.fields(member)}
        if value and value.keys() <= names and {field.name for field in required} <= value.keys():
            yield {TAG: member.__name__, **value}
    elif len(required) == 1:
        kind = required[0].type
        if takes(kind, value):
            yield {TAG: member.__name__, required[0].name: _wider(kind, value)}
        elif field_types.is_tuple(kind) and takes(get_args(kind)[0], value):
            yield {TAG: member.__name__, required[0].name: [value]}


def takes(cls: Any, value: object) -> bool:
    """Whether data of this JSON type may stand where the type is expected; of a list all items are looked at."""
    options = get_args(cls) if field_types.is_union(cls) else (cls,)
    for option in options:
        if field_types.fits(option, value):
            items = value if isinstance(value, list) else []
            return all(takes(get_args(option)[0], item) for item in items[:LONGEST])
        if isinstance(value, str | dict) and field_types.is_union(cls) and attrs.has(option):
            return True
    return False


def _wider(cls: Any, value: Any) -> Any:
    return float(value) if cls is float and type(value) is int else value


def _required(cls: type) -> list[attrs.Attribute[Any]]:
    return [field for field in field_types.fields(cls) if field.default is attrs.NOTHING]


def meant(key: str, value: object, cls: type, given: dict[Any, Any]) -> str:
    """The field that was probably meant by a key that the class does not have; empty where none is near.

    One of another library's names; else one that is spelled likewise and takes the value; else one that is hardly
    another word; else the one that is missing and takes the value.
    """
    fields = {field.name: field for field in field_types.fields(cls) if field.name not in given}
    if (known := OTHER_NAMES.get(key.lower(), "")) in fields:
        return known
    near = field_types.nearest(key, fields)
    if near and (takes(fields[near].type, value) or field_types.nearest(key, (near,), cutoff=0.8)):
        return near
    missing = [field.name for field in _required(cls) if field.name in fields and takes(field.type, value)]
    return missing[0] if len(missing) == 1 else ""
