"""What an exporter returns; what another library's file cannot say is known by reading it back."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import tomli_w
from attrs import evolve, fields, frozen, has
from ruamel.yaml import YAML

from prepkit import codec
from prepkit.codec.text import shown
from prepkit.config import Config, Origin
from prepkit.findings import Finding, PlanRejected
from prepkit.formats.importers import import_config
from prepkit.rules import found


@frozen(kw_only=True)
class Exported:
    """A config as another library's file. ``text`` is what to write; ``beside`` goes into the same folder."""

    kind: str
    """Whose file it is: a key of ``EXPORTERS``."""
    text: str
    """The file."""
    beside: tuple[tuple[str, str], ...] = ()
    """Names and texts of files that it points to."""
    left_out: tuple[Finding, ...] = ()
    """What the file cannot say, each setting with what that library would do in its place."""


@frozen(kw_only=True)
class LeftOut:
    """What an exporter makes of a config, before it is read back."""

    data: dict[str, Any]
    beside: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Names and values of files that it points to."""
    means: Config
    """The config in the form in which that library's importer would have it, where several forms mean the same."""


def exported(kind: str, draft: LeftOut, suffix: str) -> Exported:
    """The texts, and every setting that they do not say. Raises ``PlanRejected`` where the file would be refused."""
    text = WRITERS[suffix](draft.data)
    beside = tuple((name, json.dumps(data, indent=2) + "\n") for name, data in draft.beside)
    with TemporaryDirectory() as folder:
        file = Path(folder) / f"{kind}{suffix}"
        for place, written in ((file, text), *((file.parent / name, written) for name, written in beside)):
            place.write_text(written)
        try:
            read = import_config(file, kind)
        except PlanRejected as refused_back:
            places = (evolve(said, where=said.where.replace(f"{folder}/", "")) for said in refused_back.findings)
            raise PlanRejected(tuple(places)) from None
    left_out = tuple(_finding(kind, *one) for one in differences(plain(draft.means), plain(read.config), "config"))
    return Exported(kind=kind, text=text, beside=beside, left_out=left_out)


def plain(config: Config) -> Config:
    """The config without its origins, with the one micro-batch per step that None means without ``global_batch``."""
    return evolve(config, origins=(), accumulation=1 if config.accumulation is None else config.accumulation)


def differences(asked: Any, said: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """The settings that are not the same: their paths, and both values."""
    if has(type(asked)) and type(asked) is type(said):
        for field in fields(type(asked)):
            name = field.name
            yield from differences(getattr(asked, name), getattr(said, name), f"{where}.{name}")
    elif asked != said:
        yield where, asked, said


def _finding(kind: str, where: str, asked: object, said: object) -> Finding:
    what = f"a file of {kind} cannot say {shown(asked)}: read back, it says {shown(said)}"
    return found("export.not-expressible", where, what)


def refused(exported: Exported) -> PlanRejected:
    """Return what is raised for a file that would not say everything."""
    return PlanRejected(exported.left_out)


Exporter = Callable[[Config, int | None, int | None], LeftOut]
"""From a config, the number of processes and those of one machine, where they are known."""


def config_text(config: Config, path: str) -> str:
    """The file's text; its format is told by the extension. ``pk.read_config`` reads an equal config from it.

    Raises ``PlanRejected`` for an unknown extension. TOML has no null and needs none: whatever takes None has it as its
    default, and is left out.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in WRITERS:
        what, fix = f"the extension is {suffix!r}", f"Name the file with one of {', '.join(WRITERS)}."
        raise PlanRejected((found("config.unknown-extension", path, what, fix),))
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
    """Return where each setting was written, where the format has comments."""
    if suffix == ".json" or not origins:
        return ""
    return "".join(f"# {origin.setting.removeprefix('config.')} from {origin}\n" for origin in origins) + "\n"
