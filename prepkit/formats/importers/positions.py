"""Where each key of a config file stands: TOML, YAML, and JSON with comments."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable, Iterator

from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from prepkit.formats.importers.composed import DEEPEST, composed

LineColumn = tuple[int, int]
"""Line and column, from 1."""

_TOKENS = re.compile(r'"(?:\\.|[^"\\])*"|/\*.*?\*/|//[^\n]*|\#[^\n]*|,(?=\s*[}\]])', re.DOTALL)


def plain_json(text: str) -> str:
    """JSON without comments (``//``, ``#``, ``/* */``) and trailing commas; every other character keeps its place."""
    blank = _TOKENS.sub(_blanked, text)
    return _TOKENS.sub(_blanked, blank)  # a comma before a comment is seen as the last one when the comment is gone


def _blanked(token: re.Match[str]) -> str:
    return token[0] if token[0].startswith('"') else re.sub(r"[^\n]", " ", token[0])


def positions(text: str, suffix: str) -> dict[str, LineColumn]:
    """Dotted path of every key to where it stands; items of a list by their index.

    Empty where a text is beyond its reader: values are had without places.
    """
    if suffix == ".json":
        return dict(_places(text, _json(plain_json(text))))
    if suffix == ".toml":
        try:
            return dict(toml_places(text))
        except RecursionError:
            return {}
    try:
        node = composed(text)
    except (YAMLError, ValueError, RecursionError):
        return {}
    return dict(_below(node, "", set())) if node is not None else {}


def texts_of_yaml_1_1(text: str) -> dict[str, str]:
    """Keys at the top to numbers that YAML 1.1, as PyYAML reads it, has for text: ``1e-5``, which has no dot."""
    try:
        node = composed(text)
    except (YAMLError, ValueError, RecursionError):
        return {}
    pairs = node.value if isinstance(node, MappingNode) else ()
    plain = ((key.value, one.value) for key, one in pairs if isinstance(one, ScalarNode) and one.style is None)
    return {str(key): said for key, said in plain if _EXPONENT.fullmatch(said) and not _FLOAT_OF_1_1.fullmatch(said)}


_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_FLOAT_OF_1_1 = re.compile(r"[-+]?(\d+\.\d*|\.\d+)[eE][-+]\d+")
"""PyYAML's (``resolver.py``): with a dot, and a sign behind the ``e``."""


def twice_in(text: str, below: str) -> tuple[str, LineColumn, LineColumn] | None:
    """The first key of an object of JSON that is there twice, and its two places; ``below``: as in ``[0].params``."""
    above = re.sub(r"\[(?:'|\")?(.*?)(?:'|\")?\]", r".\1", below).strip(".")
    seen: dict[str, LineColumn] = {}
    for path, place in _places(text, _json(text)):
        if path in seen and path.rpartition(".")[0] == above:
            return path.removeprefix(f"{above}."), seen[path], place
        seen[path] = place
    return None


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


_At = tuple[str, int]
"""Dotted path, and offset in the text."""


# --- JSON ------------------------------------------------------------------------------------------------------------

_WORDS = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\],]|[^\s{}\[\],":]+', re.DOTALL)


def _json(text: str) -> Iterator[_At]:
    """Keys, and items of lists by their index. Ends where it goes too deep, and paths would take the memory."""
    above: list[tuple[str, int]] = []
    key: str | None
    path, index, key = "", -1, None  # of what is open: its path, the next item of a list or -1, the key that was read
    for word in _WORDS.finditer(text):
        name = str(index) if index >= 0 else key or ""
        here = f"{path}.{name}" if path else name
        begins = word[0] not in ("}", "]", ",")
        if begins and index >= 0 and above:
            yield here, word.start()
        elif begins and above and key is None:
            key = _decoded(word[0])
            yield f"{path}.{key}" if path else key, word.start()
            continue
        match word[0]:
            case "{" | "[" if len(above) == DEEPEST:
                return
            case "{" | "[" as opened:
                above.append((path, index))
                path, index, key = here, 0 if opened == "[" else -1, None
            case "}" | "]" if above:
                path, index = above.pop()
            case ",":
                key, index = None, index + 1 if index >= 0 else -1


def _decoded(word: str) -> str:
    try:
        return str(json.loads(word))
    except ValueError:
        return word


# --- TOML: tables, arrays of tables, inline tables and dotted keys ----------------------------------------------------

_SPACE = re.compile(r"(?:\s|#[^\n]*)*")
_PART = re.compile(r"""[ \t]*("(?:\\.|[^"\\\n])*"|'[^'\n]*'|[\w-]+)[ \t]*(\.)?""")
_TEXT = re.compile(r'"""(?:\\.|[^\\])*?"""(?!")|\'\'\'.*?\'\'\'(?!\')|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'', re.DOTALL)
_BARE = re.compile(r"[^,\n\]}#]+")


def toml_places(text: str) -> Iterator[tuple[str, LineColumn]]:
    """Dotted path of every key, and of items of arrays by their index, to line and column. Ends where it is no TOML."""
    yield from _places(text, sorted(_statements(text), key=lambda pair: pair[1]))


def _places(text: str, found: Iterable[_At]) -> Iterator[tuple[str, LineColumn]]:
    """Line and column of offsets, which never grow smaller."""
    starts = [0, *(each.end() for each in re.finditer("\n", text))]
    line = 0
    for path, at in found:
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
