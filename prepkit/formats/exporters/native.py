"""A config as a file of prepkit's own, in TOML, YAML or JSON: what differs from the defaults, and nothing else."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import tomli_w
from ruamel.yaml import YAML

from prepkit import codec
from prepkit.config import Config, Origin
from prepkit.findings import Finding, PlanRejected, Severity


def config_text(config: Config, path: str) -> str:
    """The file's text; its format is told by the extension. ``pk.read_config`` reads an equal config from it.

    Raises ``PlanRejected`` for an unknown extension. TOML has no null and needs none: whatever takes None has it as its
    default, and is left out.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in WRITERS:
        what, fix = f"the extension is {suffix!r}", f"Name the file with one of {', '.join(WRITERS)}."
        raise PlanRejected((_finding("unknown-extension", path, what, fix),))
    data = settings_of(attrs.evolve(config, origins=()))
    return _comments(config.origins, suffix) + WRITERS[suffix](data)


def settings_of(value: Any) -> Any:
    """The data of a value without the fields that have their default; unions keep their ``kind``."""
    data = codec.to_data(value)
    return _pruned(value, data)


def _pruned(value: Any, data: Any) -> Any:
    if isinstance(value, tuple) and isinstance(data, list):
        return [_pruned(item, inner) for item, inner in zip(value, data, strict=True)]
    if not attrs.has(type(value)) or not isinstance(data, dict):
        return data
    kept: dict[str, Any] = {"kind": data["kind"]} if "kind" in data else {}
    for field in attrs.fields(type(value)):
        inner = getattr(value, field.name)
        if field.default is attrs.NOTHING or inner != field.default:
            kept[field.name] = _pruned(inner, data[field.name])
    return kept


def _toml(data: dict[str, Any]) -> str:
    return tomli_w.dumps(data)


def _yaml(data: dict[str, Any]) -> str:
    out = io.StringIO()
    YAML().dump(data, out)
    return out.getvalue()


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"


WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {".toml": _toml, ".yaml": _yaml, ".yml": _yaml, ".json": _json}
"""Extension to the function that writes text of that format."""


def _comments(origins: tuple[Origin, ...], suffix: str) -> str:
    """Where each setting was written, where the format has comments."""
    if suffix == ".json" or not origins:
        return ""
    return "".join(f"# {origin.setting.removeprefix('config.')} from {origin}\n" for origin in origins) + "\n"


def _finding(rule: str, where: str, what: str, fix: str) -> Finding:
    return Finding(rule=f"config.{rule}", severity=Severity.ERROR, where=where, what=what, fix=fix)
