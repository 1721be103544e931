"""The table of one model type: its config's fields, and a tree for each of its classes, verified on unseen draws."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from transformers.activations import ACT2FN

from prepkit.facts import ModelFacts
from prepkit.formats.models import config_fields
from prepkit.formats.models.expressions import Unfit
from prepkit.formats.models.folder import model_facts
from tests.tools.model_tables.draws import COMMON, SKIPPED, Drawer, Probe
from tests.tools.model_tables.fit import Solver, Unsolved
from tests.tools.model_tables.merge import activation, class_data, model_table

FITTED, UNSEEN, ROUNDS = 48, 60, 4
"""Models that a table is made from, models that it is tried on, and how often those it fails on are added."""


def config_table(drawer: Drawer, probes: list[Probe]) -> dict[str, Any]:
    """Fields with defaults, other names, parts, and what the class works out from the others."""
    table = _fields(drawer.config_class, ())
    table["fields"] |= {
        path[0]: None for path in drawer.kinds if len(path) == 1 and path[0] not in table["parts"]
    } | table["fields"]
    given = [config_fields.given(table, probe.raw) for probe in probes]
    solver = Solver(given, ignored=frozenset())
    derived: dict[str, Any] = {}
    paths = dict.fromkeys(path for probe in probes for path in _paths(probe.fields, ()))
    for path in paths:
        before = [_at(one, path) for one in given]
        after = [_at(probe.fields, path) for probe in probes]
        if before == after or path[-1] in ("num_labels", "dtype") or path[-1] in _aliases(table, path[:-1]):
            continue
        try:
            derived[".".join(path)] = _worked_out(path, before, after, solver)
        except Unsolved:
            continue  # where it matters, the table does not hold on unseen draws
    return table | {"derived": derived}


def _worked_out(path: tuple[str, ...], before: list[Any], after: list[Any], solver: Solver) -> Any:
    try:
        return solver.solve({(n, ()): value for n, value in enumerate(after)}, 0)
    except (Unsolved, ValueError):
        pass
    differs = {(n, ()): a != b or type(a) is not type(b) for n, (a, b) in enumerate(zip(before, after, strict=True))}
    name = ".".join(path)
    empty = {(n, ()): one is None for n, one in enumerate(before)}
    test = f"{name} is None" if all(empty[n] or not differs[n] for n in empty) else solver.solve(differs)
    changed = (
        [n for n in range(len(after)) if empty[n, ()]]
        if test.endswith("is None")
        else [n for (n, _), new in differs.items() if new]
    )
    values = {(n, ()): after[n] for n in changed}
    if all(isinstance(value, list) for value in values.values()):
        length = solver.solve({where: len(value) for where, value in values.items()})
        each = solver.solve({(n, (i,)): one for (n, _), value in values.items() for i, one in enumerate(value)})
        return {"when": test, "length": length, "each": each, "else": name}
    if not all(value is None or isinstance(value, bool | int | str | float) for value in values.values()):
        raise Unsolved(name)
    text = solver.solve(values)
    return text if len(changed) == len(after) else f"({text}) if {test} else {name}"


def _fields(config_class: Any, above: tuple[str, ...]) -> dict[str, Any]:
    parts = getattr(config_class, "sub_configs_defaults", {})
    found: dict[str, Any] = {}
    for one in dataclasses.fields(config_class):
        if one.name in parts or (one.name in COMMON and one.name != "is_encoder_decoder"):
            continue
        default = one.default
        if default is dataclasses.MISSING:
            default = one.default_factory() if one.default_factory is not dataclasses.MISSING else None
        default = default.default if isinstance(default, dataclasses.Field) else default
        found[one.name] = default if _plain(default) else None
    inside = {name: spec.get_config_class(spec.model_type) for name, spec in parts.items()}
    return {
        "fields": found,
        "aliases": dict(config_class.attribute_map),
        "parts": {name: _fields(cls, (*above, name)) for name, cls in inside.items()},
    }


def _plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def _aliases(table: Mapping[str, Any], parts: tuple[str, ...]) -> Mapping[str, str]:
    for name in parts:
        table = table["parts"].get(name, {"aliases": {}, "parts": {}})
    return table["aliases"]


def _paths(fields: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, value in fields.items():
        if not isinstance(name, str) or not name.isidentifier() or name in (COMMON - {"dtype"}) or name[0] == "_":
            continue
        if isinstance(value, Mapping):
            yield from _paths(value, (*above, name))
        else:
            yield (*above, name)


def _at(data: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        data = data.get(name) if isinstance(data, Mapping) else None
    return list(data) if isinstance(data, tuple) else data


def solved(config_class: Any, model_class: Any) -> dict[str, Any]:
    """``{"config": ..., "model": ...}`` that gave the facts of every unseen model. Raises ``Unsolved``, ``Unbuilt``."""
    drawer = Drawer(config_class, model_class)
    probes = [*drawer.usual(), *(drawer.probe() for _ in range(FITTED))]
    wrong = ""
    for _ in range(ROUNDS):
        unseen = [drawer.probe() for _ in range(UNSEEN)]
        try:
            table = _tried(drawer, probes)
            failed = [(probe, why) for probe in (*probes, *unseen) if (why := difference(table, probe))]
        except Unsolved as error:
            wrong = str(error)
        else:
            if not failed:
                return table | {"fixed": fixed(drawer)}
            wrong = f"{len(failed)} differ: {failed[0][1]}"
            if not any(probe in unseen for probe, _ in failed):
                break
        probes += unseen
    raise Unsolved(wrong)


def _tried(drawer: Drawer, probes: list[Probe]) -> dict[str, Any]:
    fields = [probe.fields for probe in probes]
    model = model_table(list(zip(fields, (probe.facts for probe in probes), strict=True)), Solver(fields))
    table: dict[str, Any] = json.loads(json.dumps({"config": config_table(drawer, probes), "model": model}))
    return table


@cache
def common() -> dict[str, Any]:
    """Names of activations with their classes, as ``common.json`` has them beside classes that many types share."""
    known = {name: fact for name in ACT2FN if (fact := activation(name)) is not None}
    classes = {fact.name: class_data(fact) for fact in known.values()}
    return {"activations": {name: fact.name for name, fact in known.items()}, "classes": classes}


def difference(table: Mapping[str, Any], probe: Probe) -> str:
    """What the table says otherwise than the model; empty where they agree."""
    raw = json.loads(json.dumps(probe.raw))
    try:
        fields = config_fields.fields(table["config"], raw)
        made = model_facts({"module": ""} | table["model"], fields, fields["dtype"] or "float32", common())
    except Unfit as error:
        return f"unfit: {error}"
    if made == probe.facts:
        return ""
    for name in (one.name for one in ModelFacts.__attrs_attrs__):
        left, right = getattr(made, name), getattr(probe.facts, name)
        if left != right:
            if isinstance(left, tuple) and isinstance(right, tuple):
                pairs = [(a, b) for a, b in zip(left, right, strict=False) if a != b]
                return f"{name}: {len(left)} {len(right)} {pairs[:1]} of {raw}"
            return f"{name}: {left} is {right} of {raw}"
    return "?"


def outside(model: Mapping[str, Any], raw: Mapping[str, Any]) -> bool:
    """Whether the config says what the table was not tried with, which a reader is told."""
    return any(_at(raw, tuple(path.split("."))) not in (None, default) for path, default in model["fixed"].items())


def fixed(drawer: Drawer) -> dict[str, Any]:
    """Fields that could not be varied, with the value for which the table holds."""
    texts = {
        path
        for path in drawer.kinds
        if path not in drawer.varied
        and not SKIPPED.search(path[-1])
        and isinstance(_at(drawer.defaults, path), str | list)
    }
    found = {".".join(path): _at(drawer.defaults, path) for path in sorted(drawer.frozen | texts)}
    return found | kwargs_read(drawer.config_class)


READ = re.compile(r'kwargs\.(?:get|pop)\(\s*"(\w+)"(?:,\s*([^()]*))?\)')

HARMLESS = re.compile(r"rope|rotary|^num_labels$|dtype$|attn_implementation|^out_(features|indices)$|^is_causal$")


def kwargs_read(config_class: Any) -> dict[str, Any]:
    """Keys of older files that the class reads though they are no fields, with what they are if they are missing."""
    names = {one.name for one in dataclasses.fields(config_class)}
    found: dict[str, Any] = {}
    for cls in config_class.__mro__:
        if not cls.__module__.startswith("transformers.models."):
            continue
        for name, default in READ.findall(inspect.getsource(cls)):
            if name not in names and not HARMLESS.search(name) and not SKIPPED.search(name):
                try:
                    found[name] = ast.literal_eval(default)
                except (SyntaxError, ValueError):
                    found[name] = None
    return found
