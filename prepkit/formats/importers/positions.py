"""Where the keys of a file stand, and the JSON that people write: with comments and trailing commas."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from prepkit.formats.importers.source import composed

LineColumn = tuple[int, int]
"""Line and column, from 1."""

_TOKENS = re.compile(r'"(?:\\.|[^"\\])*"|/\*.*?\*/|//[^\n]*|\#[^\n]*|,(?=\s*[}\]])', re.DOTALL)
_TABLE = re.compile(r"\s*\[+\s*([^\]]+?)\s*\]+")
_ASSIGNED = re.compile(r"\s*([\w.\"'-]+?)\s*=")


def plain_json(text: str) -> str:
    """JSON without comments (``//``, ``#``, ``/* */``) and trailing commas; every other character keeps its place."""
    blank = _TOKENS.sub(_blanked, text)
    return _TOKENS.sub(_blanked, blank)  # a comma before a comment is seen as the last one when the comment is gone


def _blanked(token: re.Match[str]) -> str:
    return token[0] if token[0].startswith('"') else re.sub(r"[^\n]", " ", token[0])


def positions(text: str, suffix: str) -> dict[str, LineColumn]:
    """Dotted path of every key to where it stands; items of a list by their index.

    JSON is read as the YAML that it also is. Empty where a text is beyond that reader: values are had without places.
    """
    if suffix == ".toml":
        return dict(_toml(text))
    try:
        source = re.sub(r"\t", " ", plain_json(text)) if suffix == ".json" else text
        node = composed(source)
    except (YAMLError, ValueError, RecursionError):
        return {}
    return dict(_below(node, "", set())) if node is not None else {}


def _below(node: Node, path: str, seen: set[int]) -> Iterator[tuple[str, LineColumn]]:
    if id(node) in seen:  # an alias: its keys have been told where they stand
        return
    seen.add(id(node))
    match node:
        case MappingNode(value=pairs):
            children = [(str(key.value), key, value) for key, value in pairs]
        case SequenceNode(value=items):
            children = [(str(index), item, item) for index, item in enumerate(items)]
        case _:
            return
    for name, key, value in children:
        here = f"{path}.{name}" if path else name
        yield here, (key.start_mark.line + 1, key.start_mark.column + 1)
        yield from _below(value, here, seen)


def _toml(text: str) -> Iterator[tuple[str, LineColumn]]:
    """Tables and the keys assigned in them, line by line; inline tables as a whole."""
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if found := _TABLE.match(line):
            table = found[1].replace('"', "")
            yield table, (number, line.index("[") + 1)
        elif found := _ASSIGNED.match(line):
            key = found[1].replace('"', "").replace("'", "")
            yield f"{table}.{key}" if table else key, (number, found.start(1) + 1)
