"""What stands inside callables: closures, partial functions, bound methods. Calls none of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

DEEP = 8
"""Callables inside one another that are followed."""


def inside(call: Any, depth: int = DEEP) -> Iterator[Any]:
    """The callable, and all that it is made of, the outermost first."""
    if depth == 0:
        return
    yield call
    match call:
        case MethodType():
            parts = [call.__func__, call.__self__] if not hasattr(call.__self__, "_modules") else [call.__func__]
        case partial():
            parts = [call.func, *call.args, *call.keywords.values()]
        case FunctionType():
            parts = [*contents(call), getattr(call, "__wrapped__", None)]
        case _ if callable(call) and not isinstance(call, type) and hasattr(call, "__dict__"):
            parts = [] if hasattr(call, "_modules") else list(vars(call).values())
        case _:
            parts = []
    for part in parts:
        if part is not None:
            yield from inside(part, depth - 1)


def contents(function: FunctionType) -> Iterator[Any]:
    """Yield what its closure holds."""
    cells: tuple[CellType, ...] = function.__closure__ or ()
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
