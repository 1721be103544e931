"""The changes between two plans as text: one line where it fits, equal changes once, long lists in few words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, assert_never

from prepkit import codec
from prepkit.codec.diff import Change, Set, Splice, place
from prepkit.findings.text import collapse, count, listed, template
from prepkit.plan import Planned
from prepkit.plan.step_text import effect

ITEMS = 8
"""Items shown of those that are taken out, or put in, at one place; the rest is counted."""

WIDTH = 100
"""A change that needs more characters shows before and after on lines of their own."""


def diff_text(changes: Sequence[Change]) -> str:
    """Every change, and their number at the end."""
    if not changes:
        return "the plans are equal"
    lines = [line for alike in _alike(changes) for line in _change_lines(alike)]
    return "\n".join((*lines, count(len(changes), "difference")))


def _alike(changes: Sequence[Change]) -> list[list[Change]]:
    """Changes of equal values at places that differ in their indices only, together; names may differ so as well."""
    groups: dict[object, list[Change]] = {}
    for change in changes:
        form = tuple("*" if isinstance(key, int) else key for key in change.path)
        match change:
            case Set(before=before, after=after):
                key: object = (form, _form(before), _form(after))
            case Splice(index=index, removed=removed, added=added):
                key = (form, index, repr(removed), repr(added))
            case _:
                assert_never(change)
        groups.setdefault(key, []).append(change)
    return list(groups.values())


def _form(value: Any) -> tuple[str, str]:
    """Type and text of a value, without the indices in a name."""
    return type(value).__name__, template(value)[0] if isinstance(value, str) else repr(value)


def _change_lines(alike: list[Change]) -> Iterator[str]:
    change = alike[0]
    where = _places(alike)
    match change:
        case Set():
            old = _joined([other.before for other in alike if isinstance(other, Set)])
            new = _joined([other.after for other in alike if isinstance(other, Set)])
            if len(where) + len(old) + len(new) <= WIDTH:
                yield f"{where}: {old} -> {new}"
            else:
                yield from (f"{where}:", f"  - {old}", f"  + {new}")
        case Splice(path=path, removed=removed, added=added):
            yield f"{where}:"
            yield from _items("-", path, removed)
            yield from _items("+", path, added)
        case _:
            assert_never(change)


def _places(alike: Sequence[Change]) -> str:
    paths = [(*change.path, change.index) if isinstance(change, Splice) else change.path for change in alike]
    if len(paths) == 1:
        return place(paths[0])
    places = collapse(".".join(map(str, path)) for path in paths)
    more = " ..." if len(places) > 4 else ""
    return f"{', '.join(entry.text for entry in places[:4])}{more} ({len(paths):,} places)"


def _joined(values: Sequence[Any]) -> str:
    names = tuple(dict.fromkeys(map(str, values)))
    return value_text(values[0]) if len(names) == 1 else f"'{listed(names)}'"


def _items(sign: str, path: tuple[str | int, ...], items: Sequence[Any]) -> Iterator[str]:
    if path == ("layout",) and len(items) > 1:
        yield f"  {sign} {count(len(items), 'parameter')}: {listed([item['name'] for item in items])}"
        return
    for item in items[:ITEMS]:
        yield f"  {sign} {_step_text(item) if path == ('steps',) else value_text(item)}"
    if len(items) > ITEMS:
        yield f"  {sign} and {len(items) - ITEMS:,} more"


def _step_text(item: Any) -> str:
    planned = codec.from_data(item, Planned)
    return f"{type(planned.step).__name__}  {effect(planned.step)}"


def value_text(value: Any) -> str:
    """JSON data as people read it.

    >>> value_text({"kind": "Mesh", "shard": 8, "names": ["h.0", "h.1"]})
    'Mesh(shard=8, names=[h.0..1])'
    """
    match value:
        case dict():
            inside = ", ".join(f"{key}={value_text(item)}" for key, item in value.items() if key != "kind")
            return f"{value['kind']}({inside})" if "kind" in value else f"({inside})"
        case list() | tuple() if value and all(isinstance(item, str) for item in value):
            return f"[{listed(value, ITEMS)}]"
        case list() | tuple():
            more = f", and {len(value) - ITEMS:,} more" if len(value) > ITEMS else ""
            return f"[{', '.join(value_text(item) for item in value[:ITEMS])}{more}]"
        case str():
            return repr(value)
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case _:
            return str(value)
