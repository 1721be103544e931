"""From what a ``config.json`` says to every field that a model reads: defaults, other names, and what is worked out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prepkit.formats.models.expressions import Unfit, evaluate

MOST_ITEMS = 100_000
"""Items of a list that is worked out, and modules of a model."""

ROTARY = ("partial_rotary_factor", "rotary_pct", "rope_pct")
"""Where older files say beside ``rope_parameters`` which share of a head is rotated."""

OLDER = {
    "mamba": "linear_attention",
    "attention": "full_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}
"""Types of layers to what transformers calls them now (``remap_legacy_layer_types``)."""


def fields(table: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of the config, by a model type's table (``config`` of its file). Raises ``Unfit``."""
    found = given(table, raw)
    worked_out = {path: _derived(entry, found) for path, entry in table["derived"].items()}
    for path, value in worked_out.items():
        *parts, name = path.split(".")
        place = found
        for part in parts:
            held = place.get(part)
            inside = dict(held) if isinstance(held, Mapping) else {}
            place[part] = inside
            place = inside
        place[name] = value
    _also(table, found)
    return found


def given(table: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the file says, else the default: before anything is worked out."""
    other = {name: alias for alias, name in table["aliases"].items()}
    found: dict[str, Any] = {}
    for name, default in table["fields"].items():
        found[name] = raw.get(name, raw.get(other.get(name, ""), default))
    for name, part in table["parts"].items():
        inside = raw.get(name)
        found[name] = given(part, inside if isinstance(inside, Mapping) else {})
    if "rope_parameters" in found:
        found["rope_parameters"] = _rope(raw, found["rope_parameters"])
    for name in ("layer_types", "mtp_layer_types"):
        if isinstance(found.get(name), list):
            found[name] = [OLDER.get(one, one) if isinstance(one, str) else one for one in found[name]]
    labels = raw.get("id2label")
    found["num_labels"] = len(labels) if isinstance(labels, Mapping) else raw.get("num_labels", 2)
    found["dtype"] = raw.get("dtype", raw.get("torch_dtype"))
    return found


def _rope(raw: Mapping[str, Any], own: Any) -> dict[str, Any]:
    """``rope_scaling`` is its older name; the share of a head that is rotated used to stand beside it."""
    held = raw.get("rope_scaling") or own
    rope = dict(held) if isinstance(held, Mapping) else {}
    for name in ROTARY:
        if name in raw:
            rope.setdefault(ROTARY[0], raw[name])
    return rope


def _derived(entry: Any, found: Mapping[str, Any]) -> Any:
    if isinstance(entry, str):
        return evaluate(entry, found)
    if not evaluate(entry["when"], found):
        return evaluate(entry["else"], found)
    count = evaluate(entry["length"], found)
    if type(count) is not int or not 0 <= count <= MOST_ITEMS:
        raise Unfit(f"{entry['length']} is {count!r:.40}; a number of layers is needed")
    return [evaluate(entry["each"], found, (i,)) for i in range(count)]


def _also(table: Mapping[str, Any], found: dict[str, Any]) -> None:
    """Every field under its other name as well."""
    for alias, name in table["aliases"].items():
        found.setdefault(alias, found.get(name))
    for name, part in table["parts"].items():
        _also(part, found[name])
