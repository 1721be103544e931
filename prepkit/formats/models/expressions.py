"""Expressions in a config's fields, as tables of models hold them: read, bounded, and never run as code.

``hidden_size // num_attention_heads``, ``2 * n_inner``, ``layer_types[i] == 'full_attention'``. A name is a field, a
dot goes into a part, and ``i``, ``j``, ``k`` count the repeats around a module, the outermost first.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

INDICES = "ijk"
"""Names of the counts of the repeats around a module."""

LARGEST = 2**48
"""No size of a tensor or a count of a config is above this."""

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda value, held: isinstance(held, list | tuple | str) and value in held,
    ast.NotIn: lambda value, held: not isinstance(held, list | tuple | str) or value not in held,
}


class Unfit(ValueError):
    """The config's values do not fit the expression; the text says which."""


def evaluate(expression: str | int, fields: Mapping[str, Any], counts: tuple[int, ...] = ()) -> Any:
    """Value of the expression for these fields, inside repeats with these counts. Raises ``Unfit``."""
    if isinstance(expression, int):
        return expression
    return _value(_parsed(expression), fields, counts)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _value(node: ast.expr, fields: Mapping[str, Any], counts: tuple[int, ...]) -> Any:
    def sub(inner: ast.expr) -> Any:
        return _value(inner, fields, counts)

    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return counts[INDICES.index(name)] if name in INDICES and name not in fields else fields.get(name)
        case ast.Attribute(value=inner, attr=name):
            part = sub(inner)
            return part.get(name) if isinstance(part, Mapping) else None
        case ast.Subscript(value=inner, slice=place):
            return _item(ast.unparse(node), sub(inner), sub(place))
        case ast.BinOp(left=left, op=op, right=right):
            return _computed(op, _number(left, sub(left)), _number(right, sub(right)))
        case ast.Call(func=ast.Name(id="int"), args=[inner]):
            return int(_number(inner, sub(inner)))
        case ast.Call(func=ast.Name(id="len"), args=[inner]):
            held = sub(inner)
            return len(held) if isinstance(held, list | tuple | Mapping) else 0
    return _chosen(node, sub)


def _chosen(node: ast.expr, sub: Callable[[ast.expr], Any]) -> Any:
    """Conditions, and what is one thing or another by them."""
    match node:
        case ast.List(elts=parts):
            return [sub(part) for part in parts]
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return not sub(inner)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_number(inner, sub(inner))
        case ast.BoolOp(op=op, values=parts):
            return (all if isinstance(op, ast.And) else any)(sub(part) for part in parts)
        case ast.IfExp(test=test, body=yes, orelse=no):
            return sub(yes) if sub(test) else sub(no)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _compared(op, sub(left), sub(right))
    raise ValueError(f"{ast.unparse(node)} is no expression of a table")


def _item(text: str, held: Any, place: Any) -> Any:
    if not isinstance(held, list | tuple) or type(place) is not int or not -len(held) <= place < len(held):
        raise Unfit(f"{text} is missing: the list is {held!r:.80}")
    return held[place]


def _number(node: ast.expr, value: Any) -> Any:
    if not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
        raise Unfit(f"{ast.unparse(node)} is {value!r:.60}; a number up to {LARGEST} is needed")
    return value


def _computed(op: ast.operator, left: Any, right: Any) -> Any:
    try:
        return _ARITHMETIC[type(op)](left, right)
    except ZeroDivisionError:
        raise Unfit(f"{left} is divided by 0") from None


def _compared(op: ast.cmpop, left: Any, right: Any) -> bool:
    try:
        return _COMPARISONS[type(op)](left, right)
    except TypeError:
        return False
