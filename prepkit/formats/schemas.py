"""JSON Schemas of the files that prepkit reads and writes, by name, for editors and validators."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import NoneType
from typing import Any, get_args

import attrs

from prepkit.codec import FORMAT, KIND, field_types, files
from prepkit.codec.languages import TAG
from prepkit.config import Config
from prepkit.config.field_docs import field_docs
from prepkit.facts.env import MOST_RANKS
from prepkit.findings import Finding
from prepkit.formats.importers.accelerate import TYPES, asked_for
from prepkit.formats.importers.accelerate_engines import STRATEGIES
from prepkit.formats.importers.foreign import FALSE, TRUE
from prepkit.plan import Plan
from prepkit.plan.attestation import Attestation
from prepkit.resolve.deepspeed.keys import OPEN, REMOVED, SECTIONS, VERSION
from prepkit.resolve.deepspeed.schema import CHOICES, COMMENT, LIMITS

_TYPES = {"bool": "boolean", "int": "integer", "float": "number", "text": "string", "list": "array", "map": "object"}
_OWN = {"DeepSpeed": "config", "CompileModel": "options", "CompileBlocks": "options"}
"""Classes to the field that a file may also write as an object, where ``Config`` keeps it otherwise."""


def config() -> dict[str, Any]:
    """A config file of prepkit: also with DeepSpeed's own config, and options of the compiler, nested as objects."""
    schema = schema_of(Config, "prepkit config")
    for name, field in _OWN.items():
        inside = schema["$defs"][name]["properties"]
        described = {"description": inside[field].pop("description")} if "description" in inside[field] else {}
        nested = (
            {"type": "object"} if name == "DeepSpeed" else {"type": "object", "additionalProperties": _option(schema)}
        )
        inside[field] = {"anyOf": [inside[field], nested], **described}
    return schema


def _option(schema: dict[str, Any]) -> dict[str, Any]:
    """The value of one option of the compiler, as the list of pairs has it."""
    items = schema["$defs"]["CompileModel"]["properties"]["options"]
    pair = schema["$defs"][(items.get("anyOf", [items])[0])["items"]["$ref"].rpartition("/")[2]]
    value: dict[str, Any] = {key: one for key, one in pair["properties"]["value"].items() if key != "description"}
    return value


def plan() -> dict[str, Any]:
    """A plan file: its head, and the plan."""
    return _sealed(schema_of(Plan, "prepkit plan"), KIND, FORMAT, "plan", ("prepkit", "digests"))


def attestation() -> dict[str, Any]:
    """The file of an attestation: its head, and the attestation."""
    return _sealed(schema_of(Attestation, "prepkit attestation"), files.KIND, files.FORMAT, "attestation", ())


def findings() -> dict[str, Any]:
    """Return what commands print with ``--json``: a list of findings, each with where it was found."""
    schema = schema_of(Finding, "prepkit findings")
    one = {key: schema.pop(key) for key in ("type", "properties", "required", "description")}
    schema.pop("additionalProperties")
    entry = {"$ref": "#/$defs/Finding"}
    return schema | {
        "type": "object",
        "properties": {"findings": {"type": "array", "items": entry}},
        "required": ["findings"],
        "$defs": {**schema["$defs"], "Finding": one},
    }


def _sealed(schema: dict[str, Any], kind: str, number: int, key: str, more: tuple[str, ...]) -> dict[str, Any]:
    parts = ("type", "properties", "required", "description", "additionalProperties")
    inner = {name: schema.pop(name) for name in parts if name in schema}
    head: dict[str, Any] = {"kind": {"const": kind}, "format": {"const": number}, "digest": {"type": "string"}}
    head |= {name: {} for name in more if name == "digests"} | {key: inner}
    return schema | {
        "type": "object",
        "properties": head,
        "required": list(head),
        "additionalProperties": False,
    }


def deepspeed() -> dict[str, Any]:
    """A JSON of DeepSpeed, from the table of its keys; ``auto`` and null stand where others fill in."""
    comments: dict[str, Any] = {f"^({'|'.join(map(re.escape, COMMENT))})": {}}
    schema = {"$schema": DRAFT, "title": f"DeepSpeed {VERSION} config", **_section(""), "patternProperties": comments}
    for path in REMOVED:
        at = schema
        *above, last = path.split(".")
        for name in above:
            at = at["properties"][name]["anyOf"][0]
        at["properties"][last] = False
    return schema


def _section(path: str) -> dict[str, Any]:
    if path in OPEN or path not in SECTIONS:
        return {"type": "object"}
    inside = ((key, f"{path}.{key}" if path else key, kinds) for key, kinds in SECTIONS[path].items())
    return {
        "type": "object",
        "properties": {key: _value(below, kinds) for key, below, kinds in inside},
        "additionalProperties": False,
    }


def _value(path: str, kinds: str) -> dict[str, Any]:
    allowed = kinds.split("|")
    if "any" in allowed:
        return {}
    if path in CHOICES:
        texts = "|".join(map(_any_case, CHOICES[path]))
        return {"anyOf": [{"type": "string", "pattern": f"^({texts})$"}, {"enum": ["auto", None]}]}
    ways = [_section(path)] if "map" in allowed else []
    for kind in allowed:
        if kind != "map":
            least, most = LIMITS.get(path, (None, None)) if kind in ("int", "float") else (None, None)
            limits = {} if least is None else {"minimum": least, "maximum": most}
            ways.append({"type": _TYPES[kind], **limits})
    return {"anyOf": [*ways, {"enum": ["auto", None]}]}


# --- accelerate ------------------------------------------------------------------------------------------------------


_FULL = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_", "fp8_config": ""}
"""Sections to the beginning of their keys, which a file may leave out; that of ``fp8_config`` is one it may add."""
_EMPTY: dict[str, Any] = {"enum": [None, "", 0, False, []]}
"""What stands for a section without keys."""
_LEAST = {"num_machines": 1, **{f"{axis}_size": 1 for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}}
_SECOND = {"anyOf": [{"const": 2}, {"type": "string", "pattern": r"^\s*\+?0*2(\.0*)?\s*$"}]}
_TEXTS = {
    "whole": r"^\s*[+-]?[0-9]+(\.0*)?([eE]\+?[0-9]+)?\s*$",
    "number": r"^\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*$",
    "positive": r"^\s*\+?0*[1-9][0-9]*(\.0*)?\s*$",
}


def accelerate() -> dict[str, Any]:
    """Launch config of accelerate, from what its reader asks for: under each distributed type, and of each section."""
    top = asked_for({"distributed_type": "NO", "megatron_lm_config": {"x": 1}})
    fsdp = _is("distributed_type", ("word", *TYPES), "FSDP")
    zero = _is("distributed_type", ("word", *TYPES), "DEEPSPEED")
    by_itself = _is("distributed_type", ("word", *TYPES), "XLA", "TPU", "DEEPSPEED")
    second = {"anyOf": [_inside("fsdp_config", name, _SECOND) for name in ("fsdp_version", "version")]}
    from_json = _inside("deepspeed_config", "deepspeed_config_file", {"type": "string"})
    precision = top.asked["mixed_precision"]
    cases: tuple[tuple[str, list[dict[str, Any]], dict[str, Any]], ...] = (
        ("fsdp_config", [fsdp, second], {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}),
        ("fsdp_config", [fsdp, {"not": second}], {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}}),
        (
            "deepspeed_config",
            [zero, {"not": from_json}],
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"": 1}},
        ),
        (
            "deepspeed_config",
            [zero, from_json],
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "\0"}},
        ),
        ("dynamo_config", [{"not": by_itself}], {"distributed_type": "NO", "dynamo_config": {"": 1}}),
        (
            "fp8_config",
            [_is("mixed_precision", precision, "fp8")],
            {"distributed_type": "NO", "mixed_precision": "fp8", "fp8_config": {"backend": "AO"}},
        ),
        ("parallelism_config", [], {"distributed_type": "NO", "parallelism_config": {"": 1}}),
    )
    compiled = {"if": {"not": by_itself}, "then": {"properties": {"dynamo_backend": _asked("", ("raw",), free=False)}}}
    every = {
        name: way
        for section, _, data in cases
        for name, way in asked_for(data).asked.items()
        if name.startswith(f"{section}.")
    }
    return {
        "$schema": DRAFT,
        "title": "accelerate config",
        "type": "object",
        "properties": {
            name: _asked(name, way, free=name in top.free or name == "dynamo_backend")
            for name, way in sorted(top.asked.items())
            if "." not in name
        },
        "required": ["distributed_type"],
        "additionalProperties": False,
        "allOf": [compiled, *(_when(when, section, _closed(section, data, every)) for section, when, data in cases)],
    }


def _when(conditions: list[dict[str, Any]], section: str, schema: dict[str, Any]) -> dict[str, Any]:
    then = {"properties": {section: schema}}
    return {"if": {"allOf": conditions}, "then": then} if conditions else then


def _closed(section: str, data: dict[str, Any], every: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """A section as its reader asks for it in such a file, which has every key of it: what is not looked at has a 1."""
    inside_it = {name.partition(".")[2]: way for name, way in every.items() if name.startswith(f"{section}.")}
    own = {key: 1 if way == ("raw",) else None for key, way in inside_it.items()}
    file = asked_for({**data, section: {**own, **data[section]}})
    inside: dict[str, Any] = {}
    for name, way in sorted(file.asked.items()):
        if name.startswith(f"{section}."):
            key, start = name.partition(".")[2], _FULL.get(section)
            inside[key] = _asked(key, way, free=name in file.free)
            if start and key.startswith(start):
                inside[key.removeprefix(start)] = inside[key]
            elif start == "" and key != "fp8_format":
                inside[f"fp8_{key}"] = inside[key]
    return {"anyOf": [{"type": "object", "properties": inside, "additionalProperties": False}, _EMPTY]}


def _asked(name: str, way: tuple[str, ...], *, free: bool) -> dict[str, Any]:
    """The values that are taken where a key is asked for in this way; null is never given.

    ``free``: nobody looks at what is below it; else each key below one that is no section is unknown.
    """
    least = _LEAST.get(name.removeprefix("parallelism_config_"))
    match way[0], name:
        case _, "fsdp_version":
            return {
                "anyOf": [{"enum": [None, 0, 1]}, _SECOND, {"type": "string", "pattern": r"^\s*\+?0*[01](\.0*)?\s*$"}]
            }
        case _, "override_linear_precision":
            three = {"type": "array", "minItems": 3, "maxItems": 3, "items": {"type": "boolean"}}
            return {"anyOf": [{"type": "null"}, three, {"type": "string", "pattern": "^[^,]*,[^,]*,[^,]*$"}]}
        case _, "num_processes":
            counted = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MOST_RANKS}, {"const": -1}]}
            return {"anyOf": [{"type": "null"}, counted, {"type": "string", "pattern": _TEXTS["positive"]}]}
        case "flag", "fsdp_reshard_after_forward":
            return {"anyOf": [_flag(), {"type": "string", "pattern": f"^({'|'.join(map(_any_case, STRATEGIES))})$"}]}
        case "flag", _:
            return _flag()
        case "whole", _ if least is not None:
            counts = name == "num_machines" or name.startswith("parallelism_config_")
            number = {"type": "integer", "minimum": least} | ({"maximum": MOST_RANKS} if counts else {})
            return {"anyOf": [{"type": "null"}, number, {"type": "string", "pattern": _TEXTS["positive"]}]}
        case "whole" | "number", _:
            kind = {"whole": "integer", "number": "number"}[way[0]]
            words = [{"const": word} for word in way[1:]]
            return {"anyOf": [{"type": ["null", kind]}, {"type": "string", "pattern": _TEXTS[way[0]]}, *words]}
        case "text", _:
            return {"type": ["null", "string"]}
        case "names", _:
            return {"type": ["null", "string", "array"], "items": {"type": "string"}}
        case "word", _:
            return {"anyOf": [{"type": "null"}, _word(way[1:], way[1:])]}
        case "section", _:
            return {"anyOf": [{"type": "object"}, _EMPTY]}
    return {} if free else {"not": {"type": "object", "minProperties": 1}}


def _is(key: str, way: tuple[str, ...], *words: str) -> dict[str, Any]:
    """Return what tells that a key says one of these words."""
    return {"properties": {key: _word(way[1:], words)}, "required": [key]}


def _inside(section: str, key: str, value: dict[str, Any]) -> dict[str, Any]:
    """Return what tells that a key of a section has such a value."""
    below = {"type": "object", "properties": {key: value}, "required": [key]}
    return {"properties": {section: below}, "required": [section]}


def _word(all_words: tuple[str, ...], words: tuple[str, ...]) -> dict[str, Any]:
    """A word in any case, or its place among all of them, from 1; behind a dot, as the repr of an enum has it."""
    places = [all_words.index(word) + 1 for word in words]
    texts = "|".join((*map(_any_case, words), *(f"0*{place}" for place in places)))
    switches = [value for value, said in ((False, "no"), (True, "yes")) if said in map(str.lower, words)]
    return {"anyOf": [{"type": "string", "pattern": rf"^\s*([\s\S]*\.)?({texts})\s*$"}, {"enum": [*places, *switches]}]}


def _flag() -> dict[str, Any]:
    texts = "|".join(map(_any_case, (*TRUE, *FALSE)))
    return {
        "anyOf": [{"type": ["null", "boolean"]}, {"enum": [0, 1]}, {"type": "string", "pattern": rf"^\s*({texts})\s*$"}]
    }


def _any_case(text: str) -> str:
    return "".join(f"[{one.lower()}{one.upper()}]" if one.isalpha() else one for one in text)


SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {
    "config": config,
    "plan": plan,
    "findings": findings,
    "attestation": attestation,
    "deepspeed": deepspeed,
    "accelerate": accelerate,
}
"""Name, as ``prepkit schema`` takes it, to its schema."""


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
