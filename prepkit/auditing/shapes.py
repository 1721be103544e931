"""Whether a change of a tensor's shape only gives its sizes another order, as a permutation does that was meant."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, permutations
from math import prod
from types import FrameType

from torch import Tensor

from prepkit.observe.prepared.around import name_of, nodes_of, parsed

MOST_DIMS = 6
"""Of tensors with more nothing is told."""
MADE = frozenset({"rand", "randn", "randint", "arange", "zeros", "ones", "empty", "full", "linspace", "tensor"})
"""Functions whose values are only being made, and have no order yet."""


@lru_cache(maxsize=1024)
def permuted(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...]:
    """The order of dimensions that brings sizes, some merged, to where they are now; empty: they are in that order.

    Sizes of 1 count for nothing.
    """
    old, new = [one for one in before if one != 1], [one for one in after if one != 1]
    if not 2 <= len(new) <= len(old) <= MOST_DIMS or old == new or _merges(old, new):
        return ()
    same = next(at for at, (one, other) in enumerate(zip(old, new, strict=False)) if one != other)
    rest, wanted = old[same:], new[same:]
    for order in permutations(range(len(rest))):
        if _merges([rest[at] for at in order], wanted) and _in_groups(order, [rest[at] for at in order], wanted):
            return (*range(same), *(at + same for at in order))
    return ()


def _merges(old: Sequence[int], new: Sequence[int]) -> bool:
    """Return whether the new sizes are the old ones, with neighbours merged."""
    ends = set(accumulate(old, lambda one, other: one * other))
    return prod(old) == prod(new) and set(accumulate(new, lambda one, other: one * other)) <= ends


def _in_groups(order: Sequence[int], old: Sequence[int], new: Sequence[int]) -> bool:
    """Return whether what is merged were neighbours before, in this order; or it is the last, and the first was moved.

    As of heads and widths, which are no neighbours, merged behind what stood between them.
    """
    groups, at = [], 0
    for size in new:
        group: list[int] = []
        while prod(old[at - len(group) : at]) != size or not group:
            group.append(order[at])
            at += 1
        groups.append(group)
    if all(group == [*range(group[0], group[0] + len(group))] for group in groups):
        return True
    first = dict(zip(order, old, strict=True))[0]
    return all(group == sorted(group) for group in groups) and first % new[0] != 0


def may_be_cut(before: Sequence[int], after: Sequence[int], call: ast.Call | None) -> bool:
    """Return whether one of two sizes may be cut, and merged with the other: ``(b * k, b)`` to ``(b, k * b)``.

    Where nobody has written both sizes out.
    """
    old, new = [one for one in before if one != 1], [one for one in after if one != 1]
    moved = [one for one, other in zip(old, new, strict=False) if one != other]
    if len(old) != len(new) or len(moved) != 2:
        return False
    if abs(moved[0] - moved[1]) == 1:  # a shift of rows, as of relative positions
        return True
    if max(moved) % min(moved):
        return False
    return len(old) == 2 or call is None or any(isinstance(one, ast.BinOp | ast.UnaryOp) for one in _given(call))


def _given(call: ast.Call) -> Iterable[ast.AST]:
    return (one for argument in call.args for one in ast.walk(argument))


def call_at(frame: FrameType, names: Iterable[str]) -> ast.Call | None:
    """The call of one of these names where a frame stands; None: there are several, or none."""
    lines = nodes_of(parsed(frame.f_code.co_filename), ast.Call)
    here = [one for one in lines if one.lineno <= frame.f_lineno <= (one.end_lineno or 0) and name_of(one) in names]
    return here[0] if len(here) == 1 else None


def is_being_made(call: ast.Call | None) -> bool:
    """Return whether what it is called of was made in the same expression."""
    owner = call.func.value if call is not None and isinstance(call.func, ast.Attribute) else None
    inside = [owner] if owner is not None else []
    inside += call.args[:1] if call is not None else []
    return any(isinstance(one, ast.Call) and name_of(one) in MADE for one in inside)


def was_padded(tensor: Tensor) -> bool:
    """Return whether something was put beside it just before, as where its rows are to be shifted."""
    name = type(tensor.grad_fn).__name__
    if "Pad" in name:
        return True
    inputs = tensor.grad_fn.next_functions if tensor.grad_fn is not None else ()
    return name.startswith("Cat") and any(one is None for one, _ in inputs)
