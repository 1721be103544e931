"""Where in a file the thing is that a finding is about, and where its comments are."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterator

from attrs import frozen
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import CollectionNode, Node, ScalarNode

from prepkit.findings import Finding
from prepkit.formats.importers.composed import composed
from prepkit.formats.importers.positions import positions

_ORIGIN = re.compile(r"(?:.* in )?(.+):(\d+):(\d+)", re.DOTALL)
_WHERE = re.compile(r"(.+?):(\d+):(\d+)(?:\s.*)?", re.DOTALL)
_TOLD = re.compile(r"\bline (\d+)(?:,? column (\d+))?")
_KEY = re.compile(r"\b[a-z][a-z0-9]*(?:_[a-z0-9]+)+\b")
"""A word that can only be a key."""
_WORD = re.compile(r"\b[a-z]{4,}\b")


@frozen
class FilePlace:
    """A file, and line and column in it, from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


def place_of(finding: Finding, file: str, text: str, suffix: str) -> FilePlace:
    """Where the key or value stands that a finding about this file names; its beginning where it is about the whole."""
    place = _told_place(finding, file, text, suffix)
    if (place.file, place.line, place.column) != (file, 1, 1) or not text:
        return place
    here = positions(text, suffix)
    words = (*_KEY.findall(finding.what), finding.where.rpartition(".")[2], *_WORD.findall(finding.what))
    named = (where for word in words for path, where in here.items() if path.rpartition(".")[2] == word)
    return FilePlace(file, *next(named, (1, 1)))


def _told_place(finding: Finding, file: str, text: str, suffix: str) -> FilePlace:
    if quoted := re.findall(r"`([\w.]+)`", finding.what):  # a key that lies deeper than the setting that came of it
        here = positions(text, suffix) if text else {}
        for name in quoted:
            if name in here and "." in name:
                return FilePlace(file, *here[name])
    for pattern, said in ((_ORIGIN, finding.origin), (_WHERE, finding.where)):
        if found := pattern.fullmatch(said):
            return FilePlace(found[1], int(found[2]), int(found[3]))
    path = re.sub(r"\[(?:'|\")?(.*?)(?:'|\")?\]", r".\1", finding.where.partition(":$")[2]).strip(".")
    told = _TOLD.search(finding.what)
    if told and not path:
        return FilePlace(file, int(told[1]), int(told[2] or 1))
    places = positions(text, suffix) if path else {}
    while path and path not in places:
        path = path.rpartition(".")[0]
    line, column = places.get(path, (1, 1))
    return FilePlace(file, line, column)


# --- comments --------------------------------------------------------------------------------------------------------

_TEXT = r'"(?:\\.|[^"\\])*"'
_HASH = r"(?<!\S)(?P<comment>#[^\n]*)"
_TOKENS = {
    ".json": rf"{_TEXT}|(?P<comment>/\*.*?\*/|//[^\n]*|#[^\n]*)",
    ".toml": rf"\"\"\"(?:\\.|[^\\])*?\"\"\"|\'\'\'.*?\'\'\'|{_TEXT}|'[^'\n]*'|(?P<comment>#[^\n]*)",
    ".yaml": _HASH,
}
"""Extension to what is no comment there, and what is."""
_HERE = re.compile(r"(?<!<)<<-?[ \t]*([\"']?)([A-Za-z_]\w*)\1")
_QUOTED = r"""(?<![^\s:,\[{])(?:"(?:\\.|[^"\\\n])*"|'[^'\n]*')"""
_BLOCKS = ("|", ">")
_SHELL = rf"\\.|'[^']*'|{_TEXT}|(?<![^\s;&|()])(?P<comment>#[^\n]*)"


def comments(text: str, suffix: str) -> tuple[tuple[int, int], ...]:
    """Begin and end of every comment, in order; what only looks like one inside a string is none."""
    if suffix in (".yaml", ".yml"):
        plain, tokens = _without_scalars(text), _TOKENS[".yaml"]
    else:
        plain, tokens = (text, _TOKENS[suffix]) if suffix in _TOKENS else (_without_documents(text), _SHELL)
    return tuple(token.span("comment") for token in re.finditer(tokens, plain, re.DOTALL) if token["comment"])


def _without_documents(script: str) -> str:
    """A script with lines in place of what it gives to its commands as documents: ``<<END`` up to ``END``."""
    lines = script.split("\n")
    ends: dict[str, list[int]] = {}
    for at, line in enumerate(lines):
        ends.setdefault(line.strip("\t\r"), []).append(at)
    at = 0
    while at < len(lines):
        begun = None if lines[at].lstrip().startswith("#") else _HERE.search(lines[at])
        places = ends.get(begun[2], []) if begun else []
        end = places[found] if (found := bisect(places, at)) < len(places) else at
        lines[at + 1 : end + 1] = ["_" * len(line) for line in lines[at + 1 : end + 1]]
        at = end + 1
    return "\n".join(lines)


def _without_scalars(text: str) -> str:
    """YAML with lines in place of its values; of a text that cannot be read, of those in quotes on one line."""
    try:
        node = composed(text)
    except (YAMLError, ValueError, RecursionError):
        return re.sub(_QUOTED, lambda quoted: "_" * len(quoted[0]), text)
    parts: list[str] = []
    done = 0
    for start, end in sorted(_scalars(node, text, set())) if node is not None else ():
        if start >= done:
            parts += (text[done:start], "_" * (end - start))
            done = end
    return "".join((*parts, text[done:]))


def _scalars(node: Node, text: str, seen: set[int]) -> Iterator[tuple[int, int]]:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, ScalarNode):
        start, end = int(node.start_mark.index), scalar_end(node, text)
        block = text.find("\n", start, end) if node.style in _BLOCKS else start
        if block >= 0:
            yield block, end
    for child in node.value if isinstance(node, CollectionNode) else ():
        for part in child if isinstance(child, tuple) else (child,):
            yield from _scalars(part, text, seen)


def scalar_end(node: Node, text: str) -> int:
    """Where a value ends; a block's ends with its last line, before comments that belong to what follows."""
    end = int(node.end_mark.index)
    return len(text[:end].rstrip()) if getattr(node, "style", None) in _BLOCKS else end
