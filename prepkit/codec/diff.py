"""What differs between two plans, or two attestations, as changes on their data form, in the order in which people ask.

Lists are compared by content first, then by what an item is called, so that an inserted step is one insertion and a
renamed class is one changed name. The public ``jsonpatch`` and ``deepdiff`` were looked at: the first has no values to
show before the change and compares lists index by index, the second has no order to replay.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from copy import deepcopy
from itertools import pairwise
from typing import Any, TypeVar, assert_never

from attrs import frozen

from prepkit import codec
from prepkit.codec.languages import TAG
from prepkit.codec.text import brief, canonical, inside, shown
from prepkit.findings import Finding, PlanRejected
from prepkit.plan import Plan
from prepkit.plan.attestation import Attestation
from prepkit.rules import found

T = TypeVar("T", Plan, Attestation)

KeyPath = tuple[str | int, ...]
"""Keys and list indices from a value's data to a place in it."""

_ORDER = (
    *(
        "config",
        "facts.env",
        "mesh",
        "steps",
        "owners",
        "run",
        "layout",
        "warnings",
        "overridden",
        "facts",
        "provenance",
    ),
    *("plan", "made", "env", "drift", "rank", "asked", "warned", "fingerprints"),  # an attestation's
)
"""The parts of both in the order in which their changes are shown; facts come late, but the environment does not."""

_NAMES = ("rule", "where", "name", "path", "kind")
"""Keys that say what an item of a list is, whatever else about it changes."""


@frozen
class Set:
    """One value is replaced. Fails if another value stands there."""

    path: KeyPath
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{place(self.path)}: {shown(self.before)} -> {shown(self.after)}"


@frozen
class Splice:
    """Items of a list are taken out and others put in, at ``index``. Fails if other items stand there."""

    path: KeyPath
    index: int
    removed: tuple[Any, ...]
    added: tuple[Any, ...]

    def __str__(self) -> str:
        marked = [f"- {brief(item)}" for item in self.removed] + [f"+ {brief(item)}" for item in self.added]
        return f"{place((*self.path, self.index))}: {', '.join(marked)}"


Change = Set | Splice
"""Indices count in the list as the changes before this one left it, so a reader finds them in the new plan."""


def place(path: KeyPath) -> str:
    """The path as text.

    >>> place(("config", "engine", "wrap", "names", 0))
    'config.engine.wrap.names[0]'
    """
    where = ""
    for key in path:
        where = inside(where, key)
    return where.removeprefix(".")


def diff(a: T, b: T) -> tuple[Change, ...]:
    """Return what turns ``a`` into ``b``; nothing if the plans are equal. ``patch`` takes it back to ``b``.

    Types count: True and 1 differ. Takes ``n log n`` time for lists of ``n`` items.
    """
    return tuple(sorted(_value((), codec.to_data(a), codec.to_data(b)), key=_rank))


def patch(a: T, changes: Iterable[Change]) -> T:
    """The plan after the changes, in their order. Raises ``PlanRejected`` where one does not fit, or gives no plan.

    ``TypeError`` for what is no plan or attestation, and for what are no changes.
    """
    changes = tuple(changes)
    if not isinstance(a, Plan | Attestation) or not all(isinstance(change, Change) for change in changes):
        raise TypeError("patch takes a plan or an attestation, and the changes that pk.diff gave")
    data = codec.to_data(a)
    for change in changes:
        try:
            _apply(data, change)
        except (LookupError, TypeError, ValueError) as error:
            raise PlanRejected((_does_not_fit(change, error),)) from None
    return codec.from_data(data, type(a))


def _does_not_fit(change: Change, error: Exception) -> Finding:
    return found("diff.does-not-fit", place(change.path), f"the change {change} does not fit this plan: {error}")


def _rank(change: Change) -> int:
    head = place(change.path[:2])
    return _ORDER.index(head if head in _ORDER else place(change.path[:1]))


# --- compare -------------------------------------------------------------------------------------------------------


def _value(path: KeyPath, a: Any, b: Any) -> Iterator[Change]:
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys() and a.get(TAG) == b.get(TAG):
        for key in a:
            yield from _value((*path, key), a[key], b[key])
    elif isinstance(a, list) and isinstance(b, list):
        yield from _list(path, a, b)
    elif canonical(a) != canonical(b):
        yield Set(path, a, b)


def _list(path: KeyPath, a: list[Any], b: list[Any]) -> Iterator[Change]:
    """Changes that turn list ``a`` into list ``b``, to be applied in their order.

    Equal items pair up first, as many as can be had in order; between two such pairs items of one name do (see
    ``_name``), and their insides are compared; what is left between two pairs is one splice. Indices count in the list
    as the changes before have left it: when the pair of ``b[j]`` is reached, the list begins with ``b[:j]``.
    """
    equal = _anchors([canonical(item) for item in a], [canonical(item) for item in b])
    for (i0, j0), (i1, j1) in pairwise([(-1, -1), *equal, (len(a), len(b))]):
        alike = _anchors([_name(item) for item in a[i0 + 1 : i1]], [_name(item) for item in b[j0 + 1 : j1]])
        pairs = [(i0 + 1 + i, j0 + 1 + j) for i, j in alike]
        for (i2, j2), (i3, j3) in pairwise([(i0, j0), *pairs, (i1, j1)]):
            if i2 != i0:
                yield from _value((*path, j2), a[i2], b[j2])
            yield from _replaced(path, j2 + 1, a[i2 + 1 : i3], b[j2 + 1 : j3])


def _replaced(path: KeyPath, index: int, removed: list[Any], added: list[Any]) -> Iterator[Change]:
    """Plain values one for one where their number stays, else one splice; nothing for two empty lists."""
    if len(removed) == len(added) and not any(isinstance(item, dict | list) for item in removed + added):
        yield from (Set((*path, index + k), *pair) for k, pair in enumerate(zip(removed, added, strict=True)))
    else:
        yield Splice(path, index, tuple(removed), tuple(added))


def _name(item: Any) -> str:
    """Return what stays when an item changes; items of one name pair up in their order."""
    match item:
        case {"step": dict(step)}:
            return _name(step)
        case dict():
            return canonical([item.get(key) for key in _NAMES])
        case list():
            return ""
        case _:
            return canonical(item)


def _anchors(a: list[str], b: list[str]) -> list[tuple[int, int]]:
    """Pairs of positions, one in ``a`` and one in ``b``, of equal texts: as many as can be had with both rising.

    The n-th of several equal texts meets the n-th. That leaves one position in ``a`` for each in ``b``, and of these a
    longest increasing subsequence is taken, by patience sorting in ``n log n``: ``tops`` holds the smallest end of an
    increasing run of each length, ``ends`` the pair at which it ends, ``before`` the pair before each pair in its run.
    difflib's matcher is quadratic on lists in which every second item changed.

    >>> _anchors(["a", "b", "c"], ["b", "c", "a"])
    [(1, 0), (2, 1)]
    """
    at = {text: i for i, text in enumerate(_numbered(a))}
    pairs = [(at[text], j) for j, text in enumerate(_numbered(b)) if text in at]
    tops: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for n, (i, _) in enumerate(pairs):
        pile = bisect_left(tops, i)
        before.append(ends[pile - 1] if pile else -1)
        tops[pile : pile + 1] = [i]
        ends[pile : pile + 1] = [n]
    run: list[tuple[int, int]] = []
    n = ends[-1] if ends else -1
    while n >= 0:
        run.append(pairs[n])
        n = before[n]
    return run[::-1]


def _numbered(texts: list[str]) -> Iterator[tuple[str, int]]:
    """Each text with how many equal ones stand before it."""
    counts: Counter[str] = Counter()
    for text in texts:
        yield text, counts[text]
        counts[text] += 1


# --- replay --------------------------------------------------------------------------------------------------------


def _apply(data: Any, change: Change) -> None:
    match change:
        case Set(path=path, before=before, after=after):
            holder = _at(data, path[:-1])
            _expect(before, holder[path[-1]])
            holder[path[-1]] = deepcopy(after)
        case Splice(path=path, index=index, removed=removed, added=added):
            items = _at(data, path)
            if not isinstance(items, list) or not 0 <= index <= len(items):
                raise ValueError(f"{shown(items)} has no place {index}")
            span = slice(index, index + len(removed))
            _expect(list(removed), items[span])
            items[span] = deepcopy(list(added))
        case _:
            assert_never(change)


def _at(data: Any, path: KeyPath) -> Any:
    for key in path:
        data = data[key]
    return data


def _expect(wanted: Any, value: Any) -> None:
    if canonical(wanted) != canonical(value):
        raise ValueError(f"{shown(value)} stands there")
