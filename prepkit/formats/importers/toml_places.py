"""Where each key of a TOML text stands: tables, arrays of tables, inline tables and dotted keys, over several lines."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator

_SPACE = re.compile(r"(?:\s|#[^\n]*)*")
_PART = re.compile(r"""[ \t]*("(?:\\.|[^"\\\n])*"|'[^'\n]*'|[\w-]+)[ \t]*(\.)?""")
_TEXT = re.compile(r'"""(?:\\.|[^\\])*?"""(?!")|\'\'\'.*?\'\'\'(?!\')|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'', re.DOTALL)
_BARE = re.compile(r"[^,\n\]}#]+")

_At = tuple[str, int]
"""Dotted path, and offset in the text."""


def toml_places(text: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Dotted path of every key, and of items of arrays by their index, to line and column. Ends where it is no TOML."""
    starts = [0, *(found.end() for found in re.finditer("\n", text))]
    line = 0
    for path, at in sorted(_statements(text), key=lambda pair: pair[1]):
        while line + 1 < len(starts) and starts[line + 1] <= at:
            line += 1
        yield path, (line + 1, at - starts[line] + 1)


def _statements(text: str) -> Iterator[_At]:
    table, at = "", 0
    counts: dict[str, int] = {}
    while (at := _space(text, at)) < len(text):
        begin = at
        if text[at] == "[":
            several = text.startswith("[[", at)
            parts, at = _key(text, at + 1 + several)
            table = _path(parts if not several else parts[:-1], counts)
            if several and parts:
                name = f"{table}.{parts[-1]}" if table else parts[-1]
                counts[name] = counts.get(name, -1) + 1
                yield name, begin
                table = f"{name}.{counts[name]}"
            yield table, begin
            at += 1 + several
        else:
            at = yield from _assigned(text, at, table)
        if at <= begin:
            return


def _path(parts: list[str], counts: dict[str, int]) -> str:
    """The path of a table, with the index of the latest where a part is an array of tables."""
    path = ""
    for part in parts:
        path = f"{path}.{part}" if path else part
        if path in counts:
            path = f"{path}.{counts[path]}"
    return path


def _assigned(text: str, at: int, table: str) -> Generator[_At, None, int]:
    begin = at
    parts, at = _key(text, at)
    if not parts or text[at : at + 1] != "=":
        return begin
    path = table
    for part in parts:
        path = f"{path}.{part}" if path else part
        yield path, begin
    return (yield from _value(text, _blank(text, at + 1), path))


def _key(text: str, at: int) -> tuple[list[str], int]:
    parts = []
    while found := _PART.match(text, at):
        parts.append(found[1].strip("\"'"))
        at = found.end()
        if not found[2]:
            break
    return parts, at


def _space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _blank(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t"):
        at += 1
    return at


def _value(text: str, at: int, path: str) -> Generator[_At, None, int]:
    opened = text[at : at + 1]
    if opened not in ("[", "{"):
        found = _TEXT.match(text, at) or _BARE.match(text, at)
        return found.end() if found else at
    closed, index = {"[": "]", "{": "}"}[opened], 0
    at = _space(text, at + 1)
    while at < len(text) and text[at] != closed:
        begin = at
        if opened == "[":
            yield f"{path}.{index}", at
            at = yield from _value(text, at, f"{path}.{index}")
        else:
            at = yield from _assigned(text, at, path)
        at = _space(text, at)
        if text[at : at + 1] == ",":
            at = _space(text, at + 1)
        if at <= begin:
            return len(text)
        index += 1
    return at + 1
