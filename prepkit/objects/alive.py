"""Everything of some kind that there is in the process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import compress
from typing import Any

_seen: list[tuple[tuple[Any, ...], list[type]]] = []
"""Every object and their classes, while somebody looks at them."""


def alive(*kinds: type) -> list[Any]:
    """Every object of these classes that the collector of Python knows, the oldest first."""
    return alive_of(lambda kind: issubclass(kind, kinds))


def alive_of(is_one: Callable[[type], bool]) -> list[Any]:
    """Every object whose class is one of these.

    Each class is asked once: of some hundred thousand objects that takes a few hundredths of a second.
    """
    every, classes = _seen[0] if _seen else _now()
    meant = {kind for kind in set(classes) if is_one(kind)}
    return list(compress(every, map(meant.__contains__, classes)))


@contextmanager
def seen_once() -> Iterator[None]:
    """Inside, there is what there was when it began: one look at all that is alive serves several questions."""
    if _seen:
        yield
        return
    _seen.append(_now())
    try:
        yield
    finally:
        _seen.clear()


def _now() -> tuple[tuple[Any, ...], list[type]]:
    every = tuple(gc.get_objects())
    return every, list(map(type, every))
