"""JSON as text: a strict reader that says where it stumbled, one canonical form, and one form for people.

Knows data only (dicts, lists, strings, numbers, true, false, null); what the data means is the codec's business.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import reprlib
import select
import stat
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeAlias

from attrs import frozen

from prepkit.findings import Finding, PlanRejected
from prepkit.findings.text import shorter
from prepkit.rules import found

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

_CANONICAL = json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
_COMPACT = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_WIDTH = 120


def refusal(rule: str, where: str, what: str, fix: str) -> Finding:
    """Make the finding of the row ``codec.<rule>`` of ``rules.files``."""
    return found(f"codec.{rule}", where, what, fix)


def inside(where: str, key: object) -> str:
    """The path of what ``key`` leads to.

    >>> inside(inside("$.steps", 2), "kind"), inside("$", "a b")
    ('$.steps[2].kind', "$['a b']")
    """
    if isinstance(key, str) and key.isidentifier():
        return f"{where}.{key}"
    return f"{where}[{shown(key)}]"


def shown(value: object) -> str:
    """A value as a message quotes it: its ``repr``, cut to one short line."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**40:
        return f"an integer of {value.bit_length()} bits"
    short = reprlib.Repr()
    short.maxstring, short.maxlevel, short.maxother = 60, 2, 60
    return shorter(short.repr(value), _WIDTH)


def brief(data: Json) -> str:
    """The beginning of the compact text, with the keys in their order."""
    return shorter(_COMPACT.encode(data), _WIDTH)


# --- out -----------------------------------------------------------------------------------------------------------


def canonical(data: Json) -> str:
    """Sorted keys, no spaces: equal data gives equal text, byte for byte.

    Raises ``PlanRejected``, with the place of each, for what JSON does not have: ``inf``, ``nan``, Python objects.
    """
    try:
        return _CANONICAL.encode(data)
    except (TypeError, ValueError):
        raise PlanRejected(tuple(_unwritable(data, "$"))) from None


def digest_text(text: str) -> str:
    """``sha256:`` and the hexadecimal digest of the text in UTF-8; a lone surrogate counts as its JSON escape."""
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()


def readable(data: Json, indent: str = "") -> str:
    """The same data with line breaks: what fits stays on one line, and so does each item of a long list."""
    text = _COMPACT.encode(data)
    if len(indent) + len(text) <= _WIDTH or not isinstance(data, dict | list):
        return text
    deeper = indent + " "
    if isinstance(data, dict):
        lines = [f"{deeper}{_COMPACT.encode(key)}: {readable(value, deeper)}" for key, value in data.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if not isinstance(data[0], dict | list):
        return text
    return "[\n" + ",\n".join(deeper + _COMPACT.encode(item) for item in data) + f"\n{indent}]"


def _unwritable(data: Json, where: str) -> Iterator[Finding]:
    for place, value in _leaves(data, where):
        if isinstance(value, float) and not math.isfinite(value):
            fix = "give a finite number"
            yield refusal("wrong-value", place, f"{value!r} is a number that JSON does not have", fix)
        elif isinstance(value, int) and value.bit_length() > 4096:
            yield refusal("wrong-value", place, f"{shown(value)} is too long for JSON", "give a shorter number")
        elif not isinstance(value, bool | int | float | str | None):
            what = f"{shown(value)} is a {type(value).__name__}, which JSON does not have"
            yield refusal("wrong-type", place, what, "give text, a number, true, false or null")


def _leaves(data: object, where: str) -> Iterator[tuple[str, object]]:
    """Every value that holds no others, with its path, in order. Any depth: no recursion."""
    rest = [(where, data)]
    while rest:
        place, value = rest.pop()
        match value:
            case dict():
                rest.extend((inside(place, key), item) for key, item in reversed(value.items()))
            case list():
                rest.extend((inside(place, index), value[index]) for index in reversed(range(len(value))))
            case _:
                yield place, value


# --- in ------------------------------------------------------------------------------------------------------------


@frozen
class _Flaw:
    """Stands in the data for what strict JSON does not allow, until its path is known."""

    rule: str
    what: str
    fix: str


def parse(text: str, where: str) -> Json:
    """The data in a JSON text. ``where`` begins the path of every finding, such as ``plan.json:$``.

    Raises ``PlanRejected`` for text that is not JSON (with line and column), for keys that appear twice in one object,
    for ``NaN``, ``Infinity``, for numbers beyond the range of a float or 4000 digits, and for nesting too deep to read.
    """
    flaws: list[_Flaw] = []

    def flaw(rule: str, what: str, fix: str) -> _Flaw:
        flaws.append(_Flaw(rule, what, fix))
        return flaws[-1]

    def pairs(items: list[tuple[str, Any]]) -> Any:
        data = dict(items)
        if len(data) < len(items):
            twice, count = Counter(key for key, _ in items).most_common(1)[0]
            return flaw("duplicate-key", f"the key {shown(twice)} appears {count} times", "keep one of them")
        return data

    def number(digits: str) -> int | _Flaw:
        if len(digits) > 4000:
            return flaw("wrong-value", f"a number of {len(digits)} digits", "write a shorter number")
        return int(digits)

    def fraction(digits: str) -> float | _Flaw:
        value = float(digits)
        return value if math.isfinite(value) else constant(digits)

    def constant(name: str) -> _Flaw:
        return flaw("wrong-value", f"{shown(name)} is not a finite number", "write a finite number")

    reader = json.JSONDecoder(object_pairs_hook=pairs, parse_int=number, parse_float=fraction, parse_constant=constant)
    try:
        data: Json = reader.decode(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        what = f"not JSON at {place}: {error.msg}"
        raise PlanRejected((refusal("damaged", where, what, "restore the file, or plan again"),)) from None
    except RecursionError:
        what = "objects or lists are nested too deeply to be read"
        raise PlanRejected((refusal("damaged", where, what, "restore the file, or plan again"),)) from None
    if flaws:
        located = ((place, value) for place, value in _leaves(data, where) if isinstance(value, _Flaw))
        raise PlanRejected(tuple(refusal(flaw.rule, place, flaw.what, flaw.fix) for place, flaw in located))
    return data


PIPE_S = 10.0
"""Seconds that a pipe may take to deliver all that it has: ``prepkit show <(cat plan.json)`` is one, and so is a FIFO
that nobody writes to, for which ``open`` would wait for ever."""


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """The first ``most`` bytes of a file. Raises ``OSError``; ``TimeoutError`` for a pipe that is not done in time."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # so that a FIFO without writer opens
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return file.read(most)
        return _read_pipe(descriptor, most)


def _read_pipe(descriptor: int, most: int) -> bytes:
    until = time.monotonic() + PIPE_S
    parts: list[bytes] = []
    while (left := most - sum(map(len, parts))) > 0:
        ready, _, _ = select.select([descriptor], [], [], max(until - time.monotonic(), 0.0))
        if not ready:
            raise TimeoutError(0, f"it is a pipe, and whoever writes to it was not done after {PIPE_S:.0f} s")
        part = os.read(descriptor, min(left, 2**20))
        if not part:
            break
        parts.append(part)
    return b"".join(parts)
