"""JSON Schemas of the files that prepkit reads and writes, by name, for editors and validators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prepkit.codec import FORMAT, KIND, files
from prepkit.codec.schema import DRAFT, schema_of
from prepkit.config import Config
from prepkit.findings import Finding
from prepkit.plan import Plan
from prepkit.plan.attestation import Attestation
from prepkit.resolve.deepspeed.keys import OPEN, REMOVED, SECTIONS, VERSION
from prepkit.resolve.deepspeed.schema import CHOICES, LIMITS

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
    """What commands print with ``--json``: a list of findings, each with where it was found."""
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
    schema = {"$schema": DRAFT, "title": f"DeepSpeed {VERSION} config", **_section("")}
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
        texts = "|".join(
            "".join(f"[{one.lower()}{one.upper()}]" if one.isalpha() else one for one in text) for text in CHOICES[path]
        )
        return {"anyOf": [{"type": "string", "pattern": f"^({texts})$"}, {"enum": ["auto", None]}]}
    ways = [_section(path)] if "map" in allowed else []
    for kind in allowed:
        if kind != "map":
            least, most = LIMITS.get(path, (None, None)) if kind in ("int", "float") else (None, None)
            limits = {} if least is None else {"minimum": least, "maximum": most}
            ways.append({"type": _TYPES[kind], **limits})
    return {"anyOf": [*ways, {"enum": ["auto", None]}]}


SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {
    "config": config,
    "plan": plan,
    "findings": findings,
    "attestation": attestation,
    "deepspeed": deepspeed,
}
"""Name, as ``prepkit schema`` takes it, to its schema."""
