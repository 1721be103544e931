"""prepkit's own config file: the fields of ``Config`` in TOML, YAML or JSON, chosen by the file's extension."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from attrs import evolve
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from prepkit.codec import from_data
from prepkit.codec import text as codec_json
from prepkit.config import Config
from prepkit.findings import Finding, PlanRejected, Severity

_MEND = "mend the file at that place"
_LEAST = "write at least the engine: Single, DDP, FSDP1, FSDP2, XLA or DeepSpeed"


def read_config(path: str) -> Config:
    """The config in a file.

    Raises ``PlanRejected`` with every finding: a file that is missing, empty, damaged (with line and column), not a
    mapping or of an unknown extension; keys that appear twice; and all that ``codec.from_data`` says of the values.
    """
    where = f"{path}:$"
    text = _text(path)
    data = READERS[Path(path).suffix.lower()](text, where)
    if not isinstance(data, dict):
        what = f"the top level is a {type(data).__name__}, not a mapping of config fields"
        _refuse("not-a-mapping", where, what, "write fields such as 'engine' at the top level")
    return from_data(_spelt(data), Config, where)


def _spelt(data: dict[str, object]) -> dict[str, object]:
    """DeepSpeed's own config may be nested in ours as it is; what a ``Config`` keeps is its text."""
    engine = data.get("engine")
    if isinstance(engine, dict) and isinstance(engine.get("config"), dict):
        return {**data, "engine": {**engine, "config": json.dumps(engine["config"], default=str)}}
    return data


def _text(path: str) -> str:
    file = Path(path)
    if file.suffix.lower() not in READERS:
        ending = f"the extension {file.suffix!r}" if file.suffix else "no extension"
        _refuse("unknown-extension", path, f"the file has {ending}", f"name it with one of {', '.join(READERS)}")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        _refuse("damaged", path, f"byte {error.start} is not UTF-8: {error.reason}", "save the file as UTF-8")
    except OSError as error:
        _refuse("unreadable", path, f"the file cannot be read: {error.strerror}", "give the path of a config file")
    if not text.strip():
        _refuse("empty", path, "the file is empty", _LEAST)
    return text


def _toml(text: str, where: str) -> object:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.fullmatch(r"(.*) \(at (.*)\)", str(error), re.DOTALL)
        what = f"not TOML at {place[2]}: {place[1]}" if place else f"not TOML: {error}"
        _refuse("damaged", where, what, _MEND)
    except RecursionError:
        _refuse_depth(where)


def _json(text: str, where: str) -> object:
    try:
        return codec_json.parse(text, where)
    except PlanRejected as refused:
        mend = {"codec.damaged": _MEND}  # a config file cannot be had by planning again
        raise PlanRejected(
            tuple(evolve(finding, fix=mend.get(finding.rule, finding.fix)) for finding in refused.findings)
        ) from None


def _yaml(text: str, where: str) -> object:
    """YAML 1.2: ``NO`` is a string and ``5e8`` a float (ruamel.yaml's pure safe loader)."""
    try:
        node = YAML(typ="safe", pure=True).compose(text)
        if node is None:
            _refuse("empty", where, "the file holds comments only", _LEAST)
        if flaws := tuple(_flaws(node, where, {})):
            raise PlanRejected(flaws)
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = " ".join(str(getattr(error, part, None) or "") for part in ("context", "problem")).strip()
        _refuse("damaged", where, f"not YAML{place}: {problem or str(error).splitlines()[0]}", _MEND)
    except ValueError as error:
        _refuse("damaged", where, f"a value cannot be read: {error}", _MEND)
    except RecursionError:
        _refuse_depth(where)


def _flaws(node: Node, where: str, seen: dict[int, bool]) -> Iterator[Finding]:
    """Keys that appear twice, and values that contain themselves. Each node once, however often an alias names it."""
    if seen.setdefault(id(node), True) is False:
        return
    match node:
        case MappingNode(value=pairs):
            children = [(codec_json.inside(where, key.value), value) for key, value in pairs]
            yield from _twice([(key.value, key) for key, _ in pairs], where)
        case SequenceNode(value=items):
            children = [(codec_json.inside(where, index), item) for index, item in enumerate(items)]
        case _:
            children = []
    for place, child in children:
        if seen.get(id(child)):
            yield _finding("recursive", place, "the value contains itself", "write it out without the alias")
        else:
            yield from _flaws(child, place, seen)
    seen[id(node)] = False


def _twice(keys: list[tuple[object, Node]], where: str) -> Iterator[Finding]:
    first: dict[str, int] = {}
    for key, node in keys:
        line = node.start_mark.line + 1
        if str(key) in first:
            what = f"the key appears twice, in line {first[str(key)]} and in line {line}"
            yield _finding("duplicate-key", codec_json.inside(where, key), what, "keep one of them")
        first.setdefault(str(key), line)


def _refuse_depth(where: str) -> NoReturn:
    _refuse("damaged", where, "the values are nested too deeply to be read", _MEND)


def _refuse(rule: str, where: str, what: str, fix: str) -> NoReturn:
    raise PlanRejected((_finding(rule, where, what, fix),))


def _finding(rule: str, where: str, what: str, fix: str) -> Finding:
    return Finding(rule=f"config.{rule}", severity=Severity.ERROR, where=where, what=what, fix=fix)


READERS: dict[str, Callable[[str, str], object]] = {".toml": _toml, ".yaml": _yaml, ".yml": _yaml, ".json": _json}
"""Extension to the function that reads text of that format; the second argument begins the path of every finding."""
