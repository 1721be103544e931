"""How messages name things: paths, counts, bytes, long lists in few words, near spellings. Pure text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import groupby

from attrs import frozen


def with_names(text: str, files: Iterable[str]) -> str:
    """The text with the names of these files on one line each: one may have a line's end in it."""
    for file in files:
        if re.search(r"[\r\n]", file):
            text = text.replace(file, file.replace("\r", "\\r").replace("\n", "\\n"))
    return text


def harmless(text: str) -> str:
    """The text with its control characters as escapes, line breaks and tabs aside: a name in a file moves no cursor."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def shorter(text: str, most: int = 4000) -> str:
    """The text, cut where a message would be too long.

    >>> shorter("a name of a million digits", 14)
    'a name of a …'
    """
    return text if len(text) <= most else f"{text[: most - 2].rstrip()} …"


def at(path: str) -> str:
    """Return where a module or parameter is, for ``Hit.where``.

    >>> at("layers.0.weight"), at("")
    ('model.layers.0.weight', 'model')
    """
    return f"model.{path}" if path else "model"


def some(names: Sequence[str], limit: int = 3) -> str:
    """The first few names, and how many more there are.

    >>> some(("a", "b")), some(("a", "b", "c", "d", "e"))
    ('`a`, `b`', '`a`, `b`, `c` and 2 more')
    """
    shown = ", ".join(f"`{name}`" for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def short(number: int) -> str:
    """A number of elements in three digits or so.

    >>> short(850), short(7_100_000), short(70_600_000_000)
    ('850', '7.1 M', '70.6 B')
    """
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


_WORD = 200
"""Most characters of a word that is compared; a longer one is no misspelling."""


def near(word: str, options: Iterable[str], limit: int = 3, cutoff: float = 0.6) -> tuple[str, ...]:
    """Options that are spelled like the word, nearest first; case does not count.

    >>> near("LLaMADecoderLayer", ("LlamaDecoderLayer", "Linear"))
    ('LlamaDecoderLayer',)
    """
    by_lower: dict[str, str] = {}
    for option in options:
        by_lower.setdefault(option.lower(), option)
    return tuple(by_lower[name] for name in get_close_matches(word[:_WORD].lower(), by_lower, limit, cutoff))


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """A question to put behind a fix; empty where nothing is spelled like the word.

    >>> did_you_mean("inductr", ("inductor",))
    ' Did you mean `inductor`?'
    """
    names = near(word, options)
    return f" Did you mean {some(names)}?" if names else ""


_INDEX = re.compile(r"0|[1-9][0-9]*")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@frozen
class Collapsed:
    """Names that differ only in their indices, as one text."""

    text: str
    """Such as ``model.layers.0..79.mlp``; a single name stands for itself."""
    names: tuple[str, ...]
    """The names, in the order given."""


def template(path: str) -> tuple[str, tuple[int, ...]]:
    """The name with every index replaced by ``*``, and the indices.

    >>> template("model.layers.3.experts.0.w")
    ('model.layers.*.experts.*.w', (3, 0))
    """
    parts = path.split(".")
    numbers = tuple(int(part) for part in parts if _INDEX.fullmatch(part))
    return ".".join("*" if _INDEX.fullmatch(part) else part for part in parts), numbers


def collapse(paths: Iterable[str]) -> tuple[Collapsed, ...]:
    """The same names in fewer texts; every text stands for exactly its names. In the order of first appearance.

    >>> [one.text for one in collapse(("h.0.a", "h.1.a", "norm", "h.2.a", "h.5.a"))]
    ['h.0..2,5.a', 'norm']
    >>> [one.text for one in collapse(f"h.{i}.e.{j}" for i in range(2) for j in range(8))]
    ['h.0..1.e.0..7']
    """
    groups: dict[str, dict[tuple[int, ...], str]] = {}
    for path in paths:
        form, indices = template(path)
        groups.setdefault(form, {})[indices] = path
    return tuple(entry for form, members in groups.items() for entry in _texts(form, members))


def _texts(form: str, members: dict[tuple[int, ...], str]) -> Iterable[Collapsed]:
    for block in _blocks(tuple(members)):
        ranges = iter([_ranges(axis) for axis in block])
        text = ".".join(next(ranges) if part == "*" else part for part in form.split("."))
        inside = [frozenset(axis) for axis in block]
        names = (n for at, n in members.items() if all(i in axis for i, axis in zip(at, inside, strict=True)))
        yield Collapsed(text, tuple(names))


def _blocks(indices: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Index tuples as disjoint products of index sets: ``{0,1} x {0..7}`` where every combination occurs."""
    if not indices[0]:
        return [()]
    tails: dict[int, list[tuple[int, ...]]] = {}
    for head, *tail in indices:
        tails.setdefault(head, []).append(tuple(tail))
    alike: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for head, rest in tails.items():
        alike.setdefault(frozenset(rest), []).append(head)
    return [(tuple(heads), *block) for heads in alike.values() for block in _blocks(tails[heads[0]])]


def _ranges(indices: Sequence[int]) -> str:
    """``0..3,5`` of 0, 1, 2, 3 and 5."""
    runs = groupby(enumerate(sorted(indices)), key=lambda pair: pair[1] - pair[0])
    ends = [(members[0][1], members[-1][1]) for members in (list(run) for _, run in runs)]
    return ",".join(str(first) if first == last else f"{first}..{last}" for first, last in ends)


def listed(paths: Sequence[str], limit: int = 4) -> str:
    """The names, collapsed, at most ``limit`` texts; what is left out is counted. The root is called ``(root)``."""
    groups = collapse(path or "(root)" for path in paths)
    left = sum(len(group.names) for group in groups[limit:])
    return ", ".join(group.text for group in groups[:limit]) + (f" and {left:,} more" if left else "")


def spans(ranks: tuple[int, ...]) -> str:
    """Sorted ranks as text, runs drawn together.

    >>> spans((0, 1, 2, 5, 7, 8))
    '0-2, 5, 7-8'
    """
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def count(number: int, noun: str) -> str:
    """``1 unit``, ``1,024 ranks``, ``4 micro-batches``."""
    ending = "" if number == 1 else "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{number:,} {noun}{ending}"


def in_bytes(number: float) -> str:
    """Bytes in the largest binary unit that keeps at least one whole one: ``1.50 GiB``."""
    size = 0
    while number >= 1024 and size < len(_UNITS) - 1:
        number, size = number / 1024, size + 1
    return f"{number:.0f} B" if size == 0 else f"{number:.2f} {_UNITS[size]}"


def local_device(kind: str) -> str:
    """A device of this type that each process has for itself, in words."""
    return "the CPU" if kind == "cpu" else f"{kind}:<local rank>"


def aligned(rows: Sequence[tuple[str, ...]], indent: int = 0) -> Iterator[str]:
    """Rows as lines, each column as wide as its widest cell, columns that are empty throughout left out."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width]
        yield (" " * indent + "  ".join(cells)).rstrip()
