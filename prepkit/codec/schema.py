"""JSON Schemas (2020-12) of values, from the types that ``codec.from_data`` reads them by."""

from __future__ import annotations

from types import NoneType
from typing import Any, get_args

import attrs

from prepkit.codec import field_types
from prepkit.codec.languages import TAG
from prepkit.config.field_docs import field_docs

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_LARGEST = 2**64 - 1
_FINITE = 1.7976931348623157e308
_SCALARS: dict[Any, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer", "minimum": -_LARGEST, "maximum": _LARGEST},
    float: {"type": "number", "minimum": -_FINITE, "maximum": _FINITE},
    str: {"type": "string"},
    NoneType: {"type": "null"},
}


def schema_of(cls: type, title: str) -> dict[str, Any]:
    """The schema of the data form of a class; each class below it is a definition, with the names of its kinds."""
    definitions: dict[str, Any] = {}
    root = _object(cls, definitions)
    return {"$schema": DRAFT, "title": title, **root, "$defs": dict(sorted(definitions.items()))}


def _of(cls: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if cls in _SCALARS:
        return dict(_SCALARS[cls])
    if field_types.is_choice(cls):
        return {"enum": list(field_types.choices(cls))}
    if field_types.is_tuple(cls):
        return _list(get_args(cls), definitions)
    if field_types.is_union(cls):
        return _union(cls, definitions)
    if cls.__name__ not in definitions:
        definitions[cls.__name__] = {}  # a class may hold itself
        definitions[cls.__name__] = _object(cls, definitions)
    return {"$ref": f"#/$defs/{cls.__name__}"}


def _list(items: tuple[Any, ...], definitions: dict[str, Any]) -> dict[str, Any]:
    if Ellipsis in items:
        return {"type": "array", "items": _of(items[0], definitions)}
    each = [_of(item, definitions) for item in items]
    return {"type": "array", "prefixItems": each, "minItems": len(each), "maxItems": len(each)}


def _union(cls: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """One of its members: an object that names its kind, or the bare name where nothing else is needed."""
    kinds = field_types.kinds(cls)
    ways: list[dict[str, Any]] = []
    for name, kind in kinds.items():
        reference = _of(kind, definitions)
        ways.append({**reference, "required": [TAG], "properties": {TAG: {"const": name}}})
    if bare := [name for name, kind in kinds.items() if not _needed(kind)]:
        ways.append({"enum": bare})
    ways += (_of(member, definitions) for member in get_args(cls) if member not in kinds.values())
    return {"anyOf": ways} if len(ways) > 1 else ways[0]


def _object(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    tag = {TAG: {"const": cls.__name__}} if cls in field_types.tagged() else {}
    said = field_docs(cls)
    properties = {
        field.name: {
            **_of(field.type, definitions),
            **({"description": said[field.name]} if field.name in said else {}),
        }
        for field in field_types.fields(cls)
    }
    doc = (cls.__doc__ or "").split("\n\n")[0].replace("\n", " ").strip()
    needed = _needed(cls)
    return {
        "type": "object",
        **({"description": doc} if doc else {}),
        "properties": tag | properties,
        "additionalProperties": False,
        **({"required": needed} if needed else {}),
    }


def _needed(cls: type) -> list[str]:
    return [field.name for field in field_types.fields(cls) if field.default is attrs.NOTHING]
