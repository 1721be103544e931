"""prepkit's own config file: the fields of ``Config`` in TOML, YAML or JSON, chosen by the file's extension."""

from __future__ import annotations

import json
import re

from attrs import evolve

from prepkit.codec import from_data
from prepkit.codec.misfits import meant
from prepkit.config import Config, Origin
from prepkit.config.origin import origin_of
from prepkit.findings import Finding, PlanRejected
from prepkit.formats.importers.positions import positions
from prepkit.formats.importers.source import LANGUAGES, Imported, Source, read, refuse_damage, refuse_unrecognised


def read_config(path: str) -> Config:
    """The config in a file.

    Raises ``PlanRejected`` with every finding: a file that is missing, empty, damaged (with line and column), not a
    mapping or of an unknown extension; keys that appear twice; and all that ``codec.from_data`` says of the values.
    """
    return read_prepkit(read(path)).config


def read_prepkit(source: Source) -> Imported:
    """The same as an importer returns it: nothing in the file is about anything but preparation."""
    where, data = f"{source.path}:$", source.data()
    if data and not any(meant(str(key), value, Config, {}) for key, value in data.items()):
        refuse_unrecognised(source.path, tuple(map(str, data)))
    try:
        spelt = _spelt(data)
    except (TypeError, ValueError, RecursionError) as error:
        refuse_damage(f"{where}.engine.config", f"it is nothing that JSON has: {error}")
    written = _written(source)
    try:
        config = from_data(spelt, Config, where, LANGUAGES[source.suffix])
    except PlanRejected as refused:
        found = tuple(evolve(finding, origin=_origin(written, finding, where)) for finding in refused.findings)
        rest = refused.rest
        raise PlanRejected(
            found, rest=Imported(config=rest, kind="prepkit", written=written) if isinstance(rest, Config) else None
        ) from None
    return Imported(config=config, kind="prepkit", written=written)


def _written(source: Source) -> tuple[Origin, ...]:
    """Return where each key is in the file."""
    return tuple(
        Origin(setting=f"config.{key}", key=key, source=source.path, line=line, column=column)
        for key, (line, column) in positions(source.text, source.suffix).items()
    )


def _origin(written: tuple[Origin, ...], finding: Finding, where: str) -> str:
    """Where the key that a path such as ``c.toml:$.loaders[0].name`` names was written, or one that it is part of."""
    path = re.sub(r"\[(?:'|\")?(.*?)(?:'|\")?\]", r".\1", finding.where.removeprefix(where))
    return str(origin_of(written, f"config{path}") or "")


def _spelt(data: dict[str, object]) -> dict[str, object]:
    """Return what Python takes as a mapping a file may write as one.

    DeepSpeed's own config is nested in ours as it is, and a ``Config`` keeps its text; options of ``torch.compile`` are
    names with values, and a ``Config`` keeps them one by one.
    """
    engine, compiled = data.get("engine"), data.get("compile")
    if isinstance(engine, dict) and isinstance(engine.get("config"), dict):
        data = {**data, "engine": {**engine, "config": json.dumps(engine["config"], default=str)}}
    if isinstance(compiled, dict) and isinstance(compiled.get("options"), dict):
        pairs = [{"name": name, "value": value} for name, value in compiled["options"].items()]
        data = {**data, "compile": {**compiled, "options": pairs}}
    return data
