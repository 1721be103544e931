"""The small changes: one row of ``EXPRESSIONS`` or ``STATEMENTS`` for each kind of node."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from attrs import evolve, frozen

from tests.mutants.mutant import Mutant
from tests.mutants.walk import Site, sites

COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
}
SWAPPED = {"any": "all", "all": "any", "min": "max", "max": "min", "sorted": "list"}


@frozen
class Edit:
    """The text that replaces a node, or, with ``insert``, that goes right behind it."""

    operator: str
    node: ast.AST
    new: str
    insert: bool = False


def _source(node: ast.AST, **changes: Any) -> str:
    changed = copy.copy(node)
    for name, value in changes.items():
        setattr(changed, name, value)
    return f"({ast.unparse(changed)})"


def _without(items: list[Any], index: int) -> list[Any]:
    return items[:index] + items[index + 1 :]


# --- expressions ---------------------------------------------------------------------------------------------------


def _compare(site: Site, node: ast.Compare) -> Iterator[Edit]:
    for index, op in enumerate(node.ops):
        for other in COMPARED[type(op)]:
            ops = [*node.ops[:index], other(), *node.ops[index + 1 :]]
            yield Edit("comparison", node, _source(node, ops=ops))


def _boolean(site: Site, node: ast.BoolOp) -> Iterator[Edit]:
    yield Edit("and or", node, _source(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And()))
    for index in range(len(node.values)):
        rest = _without(node.values, index)
        yield Edit(
            "operand removed", node, _source(node, values=rest) if len(rest) > 1 else f"({ast.unparse(rest[0])})"
        )


def _unary(site: Site, node: ast.UnaryOp) -> Iterator[Edit]:
    if isinstance(node.op, ast.Not):
        yield Edit("not removed", node, f"({ast.unparse(node.operand)})")


def _either(site: Site, node: ast.IfExp) -> Iterator[Edit]:
    yield Edit("branches swapped", node, _source(node, body=node.orelse, orelse=node.body))


def _constant(site: Site, node: ast.Constant) -> Iterator[Edit]:
    match node.value:
        case bool() as value:
            yield Edit("constant", node, str(not value))
        case int() as value:
            yield Edit("constant", node, str(value + 1))
            if value > 0:
                yield Edit("constant", node, str(value - 1))
        case float() as value:
            yield Edit("constant", node, repr(value + 1))
        case str() as text:
            yield Edit("constant", node, '""' if text else '"x"')


def _call(site: Site, node: ast.Call) -> Iterator[Edit]:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    for index, word in enumerate(node.keywords):
        checks_only = name == "zip" and word.arg == "strict"
        says_only = word.arg in {"fix", "what", "summary", "source", "reason"}
        if not checks_only and not says_only:
            yield Edit("keyword removed", node, _source(node, keywords=_without(node.keywords, index)))
    if name in SWAPPED and not (name == "sorted" and node.keywords):
        yield Edit("function swapped", node, _source(node, func=ast.Name(id=SWAPPED[name])))


def _several(site: Site, node: ast.Tuple | ast.List | ast.Set) -> Iterator[Edit]:
    if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del) or not node.elts or _is_index(site):
        return
    empty = "()" if isinstance(node, ast.Tuple) else "[]" if isinstance(node, ast.List) else "set()"
    yield Edit("emptied", node, empty)
    if not site.scope and len(node.elts) > 1:
        for index in range(len(node.elts)):
            yield Edit("row removed", node, _source(node, elts=_without(node.elts, index)))


def _is_index(site: Site) -> bool:
    return isinstance(site.parent, ast.Subscript) and site.node is site.parent.slice


def _table(site: Site, node: ast.Dict) -> Iterator[Edit]:
    for index in range(len(node.keys)):
        fewer = _source(node, keys=_without(node.keys, index), values=_without(node.values, index))
        yield Edit("row removed", node, fewer)


def _computed(site: Site, node: ast.BinOp) -> Iterator[Edit]:
    if other := COMPUTED.get(type(node.op)):
        yield Edit("arithmetic", node, _source(node, op=other()))


def _filtered(site: Site, node: ast.comprehension) -> Iterator[Edit]:
    for test in node.ifs:
        yield Edit("filter removed", test, "True")


# --- statements ----------------------------------------------------------------------------------------------------


def _tested(site: Site, node: ast.If | ast.While) -> Iterator[Edit]:
    yield Edit("condition negated", node.test, f"(not ({ast.unparse(node.test)}))")


def _returned(site: Site, node: ast.Return) -> Iterator[Edit]:
    if node.value is None:
        yield Edit("statement removed", node, "pass")
        return
    kind = ast.unparse(site.function.returns) if site.function and site.function.returns else ""
    if isinstance(node.value, ast.Constant):
        return  # constants have mutants of their own
    if kind == "bool":
        yield Edit("result", node.value, f"(not ({ast.unparse(node.value)}))")
    elif kind.startswith("tuple[") and not isinstance(node.value, ast.Tuple):
        yield Edit("result", node.value, "()")
    elif kind == "str":
        yield Edit("result", node.value, '""')
    elif kind in {"int", "float"}:
        yield Edit("result", node.value, f"({ast.unparse(node.value)}) + 1")
    elif kind not in {"None", ""} and not kind.startswith("tuple["):
        yield Edit("result", node.value, "None")


def _expression(site: Site, node: ast.Expr) -> Iterator[Edit]:
    yields = isinstance(node.value, ast.Yield | ast.YieldFrom)
    yield Edit("statement removed", node, "yield from ()" if yields else "pass")


def _assigned(site: Site, node: ast.Assign) -> Iterator[Edit]:
    """An attribute, an item, or a name that has a value already."""
    known = isinstance(node.targets[0], ast.Attribute | ast.Subscript) or _assigned_before(site, node)
    if site.scope and known:
        yield Edit("statement removed", node, "pass")


def _assigned_before(site: Site, node: ast.Assign) -> bool:
    names = {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    if site.function is None:
        return False
    earlier = (part for part in ast.walk(site.function) if isinstance(part, ast.Name) and part.lineno < node.lineno)
    stored = {part.id for part in earlier if isinstance(part.ctx, ast.Store)}
    stored |= {part.arg for part in ast.walk(site.function.args) if isinstance(part, ast.arg)}
    return names <= stored


def _removed(site: Site, node: ast.stmt) -> Iterator[Edit]:
    yield Edit("statement removed", node, "pass")


def _loop(site: Site, node: ast.For) -> Iterator[Edit]:
    yield Edit("loop emptied", node.iter, "()")


def _arm(site: Site, node: ast.match_case) -> Iterator[Edit]:
    if node.guard is not None:
        yield Edit("guard removed", node.guard, "True")
    elif not (isinstance(node.pattern, ast.MatchAs) and node.pattern.pattern is None):
        yield Edit("arm removed", node.pattern, " if False", insert=True)


OPERATORS: dict[type[ast.AST], Callable[[Site, Any], Iterator[Edit]]] = {
    ast.Compare: _compare,
    ast.BoolOp: _boolean,
    ast.UnaryOp: _unary,
    ast.IfExp: _either,
    ast.Constant: _constant,
    ast.Call: _call,
    ast.Tuple: _several,
    ast.List: _several,
    ast.Set: _several,
    ast.Dict: _table,
    ast.BinOp: _computed,
    ast.comprehension: _filtered,
    ast.If: _tested,
    ast.While: _tested,
    ast.Return: _returned,
    ast.Expr: _expression,
    ast.Assign: _assigned,
    ast.AugAssign: _removed,
    ast.Break: _removed,
    ast.Continue: _removed,
    ast.Raise: _removed,
    ast.For: _loop,
    ast.match_case: _arm,
}


def mutants(path: str, source: bytes) -> tuple[Mutant, ...]:
    """All mutants of a file, in source order; those that read alike count up."""
    starts = [0, *accumulate(len(line) for line in source.splitlines(keepends=True))]
    seen: Counter[str] = Counter()
    places: set[tuple[int, int, str]] = set()
    found: list[Mutant] = []
    for site in sites(ast.parse(source)):
        for edit in OPERATORS.get(type(site.node), _none)(site, site.node):
            mutant = _mutant(path, source, starts, site, edit)
            if (mutant.start, mutant.end, mutant.new) in places or mutant.old == mutant.new:
                continue
            places.add((mutant.start, mutant.end, mutant.new))
            found.append(evolve(mutant, ordinal=seen[mutant.id]))
            seen[mutant.id] += 1
    return tuple(found)


def _none(site: Site, node: ast.AST) -> Iterator[Edit]:
    yield from ()


def _mutant(path: str, source: bytes, starts: list[int], site: Site, edit: Edit) -> Mutant:
    node: Any = edit.node
    start = starts[node.lineno - 1] + node.col_offset
    end = starts[node.end_lineno - 1] + node.end_col_offset
    old = source[start:end].decode()
    return Mutant(
        path=path,
        scope=site.scope,
        operator=edit.operator,
        start=start,
        end=end,
        old=old,
        new=old + edit.new if edit.insert else edit.new,
        line=node.lineno,
        lines=_reaching(site, node),
    )


def _reaching(site: Site, node: Any) -> tuple[int, ...]:
    """A simple statement's lines; of a compound one only the node's, and the first, which is its header."""
    if hasattr(site.statement, "body") or hasattr(site.statement, "cases"):
        return tuple(range(node.lineno, node.end_lineno + 1))
    last = site.statement.end_lineno or site.statement.lineno
    return tuple(range(site.statement.lineno, last + 1))
