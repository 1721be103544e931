"""Regular expressions that take exponential time: found in the expression itself, before any name is held against it.

Python's ``re`` tries every way to divide a text among repeats and alternatives, and has no time limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import log10
from typing import Any

LONGEST = 1000
"""Characters of an expression or of a replacement."""

ENDLESS = 100
"""Ways in which a repeat without end can end in a name: about as many as the name has characters."""

MOST = 8.5
"""Decimal digits of the number of ways that are still tried: four repeats without end, beside each other."""


def cost(pattern: str, replacement: str) -> str:
    """Why a pair of ``rename`` could take longer than anybody waits; empty where it cannot.

    Raises ``re.error`` for what is no regular expression.

    >>> cost("^layers[.](.*)[.]gamma$", "weight")
    ''
    >>> cost("(a+)+$", "")
    'too costly: ... Write no repeat inside a repeat, at most four without end, and several pairs in place of one'
    """
    if len(pattern) > LONGEST or len(replacement) > LONGEST:
        return f"too long: at most {LONGEST} characters each. Write several pairs in place of one"
    re.compile(pattern)  # says what is wrong with it
    from re import _parser  # type: ignore[attr-defined]  # the tree has no public reader

    if _digits(_parser.parse(pattern)) <= MOST:
        return ""
    many = "a name can be divided among its repeats in more than 10**8 ways, and each is tried"
    instead = "Write no repeat inside a repeat, at most four without end, and several pairs in place of one"
    return f"too costly: {many}. {instead}"


def _digits(tree: Any) -> float:
    """Decimal digits of the number of ways to match a tree: ways multiply, so their digits add up."""
    return sum(_of_node(str(op), value) for op, value in tree)


def _of_node(op: str, value: Any) -> float:
    inner = sum(_digits(tree) for tree in _trees(value))
    if op.endswith("_REPEAT"):
        low, high, _ = value
        rounds = min(int(high), ENDLESS)
        return rounds * inner + log10(max(1, rounds - min(int(low), rounds) + 1) if low != high else 1)
    if op == "BRANCH":
        return inner + log10(len(value[1]))
    return inner


def _trees(value: Any) -> Iterator[Any]:
    """The trees in what a node holds: groups, repeats, alternatives and lookarounds hold them at different places."""
    if hasattr(value, "getwidth"):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _trees(item)
