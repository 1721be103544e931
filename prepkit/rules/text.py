"""How findings name things: paths, counts, short lists and near spellings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def at(path: str) -> str:
    """Where a module or parameter is, for ``Hit.where``.

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


def count(number: int, noun: str) -> str:
    """A number with its noun.

    >>> count(1, "parameter"), count(3, "parameter")
    ('1 parameter', '3 parameters')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def short(number: int) -> str:
    """A number of elements in three digits or so.

    >>> short(850), short(7_100_000), short(70_600_000_000)
    ('850', '7.1 M', '70.6 B')
    """
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def near(word: str, options: Iterable[str], limit: int = 3) -> tuple[str, ...]:
    """Options that are spelled like the word, nearest first; case does not count.

    >>> near("LLaMADecoderLayer", ("LlamaDecoderLayer", "Linear"))
    ('LlamaDecoderLayer',)
    """
    by_lower: dict[str, str] = {}
    for option in options:
        by_lower.setdefault(option.lower(), option)
    return tuple(by_lower[found] for found in get_close_matches(word.lower(), by_lower, limit))


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """A question to put behind a fix; empty where nothing is spelled like the word.

    >>> did_you_mean("inductr", ("inductor",))
    ' Did you mean `inductor`?'
    """
    found = near(word, options)
    return f" Did you mean {some(found)}?" if found else ""
