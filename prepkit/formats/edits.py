"""A config file without one key, or with another name for it: that place of the text is changed, and no other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from itertools import islice
from typing import Any

from attrs import evolve
from ruamel.yaml.nodes import CollectionNode, MappingNode, Node

from prepkit.findings import Finding, PlanRejected
from prepkit.formats.importers import IMPORTERS
from prepkit.formats.importers.foreign import lenient
from prepkit.formats.importers.positions import plain_json, positions
from prepkit.formats.importers.source import Imported, Source, composed


def without(source: Source, path: str) -> str | None:
    """The text without the key at a dotted path; None where no edit leaves every other value as it is."""
    *parts, name = path.split(".")

    def removed(data: dict[str, Any]) -> None:
        _at(data, parts).pop(name)

    return _first(source, _cuts(source, path), removed)


def renamed(source: Source, path: str, new: str) -> str | None:
    """The text with another name for the key at a dotted path; None as above, or where the new name is taken."""
    *parts, name = path.split(".")

    def moved(data: dict[str, Any]) -> None:
        place = _at(data, parts)
        if new in place:
            raise KeyError(new)
        place[new] = place.pop(name)

    start = _offset(source, path)
    if start is None:
        return None
    quote = source.text[start] if source.text[start] in "\"'" else ""
    spelt = json.dumps(new) if quote == '"' else f"{quote}{new}{quote}"
    end = start + len(name) + 2 * len(quote)
    return _first(source, iter((source.text[:start] + spelt + source.text[end:],)), moved)


def _first(source: Source, texts: Iterator[str], change: Any) -> str | None:
    """The first text that is read as the data with the change."""
    try:
        meant = deepcopy(lenient(source))
        change(meant)
    except (PlanRejected, KeyError, TypeError, AttributeError):
        return None
    for text in texts:
        try:
            if lenient(Source(source.path, text, source.suffix)) == meant:
                return text
        except PlanRejected:
            continue
    return None


def _at(data: Any, parts: list[str]) -> Any:
    for part in parts:
        data = data[part]
    return data


def _offset(source: Source, path: str) -> int | None:
    """Return where the key begins in the text."""
    place = positions(source.text, source.suffix).get(path)
    if place is None:
        return None
    lines = source.text.splitlines(keepends=True)
    return sum(map(len, lines[: place[0] - 1])) + place[1] - 1


def _cuts(source: Source, path: str) -> Iterator[str]:
    """Texts without the key: its lines, and, where it shares them, itself with the comma behind or before it."""
    start = _offset(source, path)
    if start is None:
        return
    text = source.text
    begin = text.rfind("\n", 0, start) + 1
    for end in _ends(source, path, start):
        line = text.find("\n", end) + 1 or len(text)
        yield text[:begin] + text[line:]
        if behind := re.match(r"[ \t]*,\s*", text[end:]):
            yield text[:start] + text[end + behind.end() :]
        yield re.sub(r",\s*$", "", text[:start]) + text[end:]


def _ends(source: Source, path: str, start: int) -> Iterator[int]:
    """Yield where its value may end."""
    if source.suffix == ".toml":
        for end in islice(re.finditer(r"\n|\Z|\s*[,}]", source.text[start:]), _MOST):
            yield start + end.start()
        return
    plain = re.sub("\t", " ", plain_json(source.text)) if source.suffix == ".json" else source.text
    node = composed(plain)
    for part in path.split("."):
        pairs = node.value if isinstance(node, MappingNode) else ()
        node = next((value for key, value in pairs if str(key.value) == part), None)
    if node is not None:
        yield _last(node)


def _last(node: Node) -> int:
    """The end of a value; a block's ends with its last scalar, before comments that belong to what follows."""
    if not isinstance(node, CollectionNode) or node.flow_style or not node.value:
        return int(node.end_mark.index)
    last = node.value[-1]
    return _last(last[1] if isinstance(last, tuple) else last)


# --- mending ---------------------------------------------------------------------------------------------------------

STRICT = ("accelerate", "llamafactory", "transformers")
"""Libraries that start nothing with a file that has an unknown key at its top: another name for it changes no run."""

_PLACE = re.compile(r".*:\d+:\d+ (\S+)")
_NEAR = re.compile(r"Write '([\w.]+)', or remove it\.")
_MOST = 50


def mended(source: Source, kind: str) -> tuple[Source, tuple[Finding, ...]]:
    """The file with what is safe to mend, and the findings that are gone.

    Keys without effect are removed where all that is read of the file stays as it is; a misspelt key at the top of a
    file that its library would refuse gets the name that is meant. Each edit is read again before it counts.
    """
    gone: list[Finding] = []
    for _ in range(_MOST):
        step = next(_steps(source, kind), None)
        if step is None:
            break
        source, finding = step
        gone.append(finding)
    return source, tuple(gone)


def _steps(source: Source, kind: str) -> Iterator[tuple[Source, Finding]]:
    """Edits that are safe, each with the finding that it ends."""
    read, findings = _read(source, kind)
    for finding in findings:
        place = _PLACE.fullmatch(finding.where)
        near = _NEAR.fullmatch(finding.fix)
        text = None
        if place and finding.rule == "import.no-effect" and finding.fix == "Remove it.":
            text = without(source, place[1])
        elif place and near and kind in STRICT and "." not in place[1] and finding.rule == "import.unknown-key":
            text = renamed(source, place[1], near[1])
        if text is None:
            continue
        after, left = _read(Source(source.path, text, source.suffix), kind)
        same = finding.rule == "import.unknown-key" or (read is not None and after == read)
        if same and {said_of(one) for one in left} < {said_of(one) for one in findings}:
            yield Source(source.path, text, source.suffix), finding


def said_of(finding: Finding) -> tuple[str, str]:
    """What a finding says, and of which key, wherever that stands: places move when the text is mended."""
    return finding.rule, f"{finding.where.rpartition(' ')[2]}: {finding.what}"


def _read(source: Source, kind: str) -> tuple[Imported | None, tuple[Finding, ...]]:
    """Return what is read of the file but for places, and what is said of it."""
    try:
        imported = IMPORTERS[kind].read(source)
    except PlanRejected as refused:
        rest = refused.rest if isinstance(refused.rest, Imported) else None
        return (None if rest is None else _meant(rest)), refused.findings
    return _meant(imported), imported.notes


def _meant(imported: Imported) -> Imported:
    config = evolve(imported.config, origins=())
    return evolve(imported, config=config, not_preparation=(), unchanged=(), written=(), notes=())
