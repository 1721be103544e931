"""Summands of a loss whose graph is lost on the way from what trains, as behind a threshold or a bare gradient."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from attrs import frozen
from torch import Tensor, nn

from prepkit.auditing.term_texts import CUTS, MOST_TERMS, Text
from prepkit.facts.terms import ConstantTerm
from prepkit.observe.prepared.around import is_foreign, known, name_of, nodes_of, parsed

LIKE = frozenset({"size", "numel", "dim", "len", "isinstance", "zeros_like", "ones_like", "full_like", "empty_like"})
LIKE |= {"rand_like", "randn_like", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty"}
"""Calls that take no values of what they are given."""
ABOUT = frozenset({"shape", "device", "dtype", "ndim"})
STEPS = frozenset({"argmax", "argmin", "argsort", "round", "sign", "floor", "ceil", "long", "int", "bool", "byte"})
"""Calls whose results change by steps, so that they have no gradient."""
BRANCHES = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.Await, ast.NamedExpr)
"""What gives one value or another, which a text does not tell."""
RESTS = ("no_grad", "inference_mode", "set_grad_enabled")
MOST_NESTED = 48
"""Expressions in each other that are followed."""
Trains = Callable[[Any], bool]


@frozen(eq=False)
class Scope:
    """Names of a function: what they stand for, which of them come from what trains, and what made the others."""

    value: Callable[[ast.expr], Any]
    made: Mapping[str, ast.expr | None]
    """By name; None: that is not known."""
    given: frozenset[str] = frozenset()
    """Arguments that come from what trains."""


@frozen(eq=False)
class Way:
    """How far what trains has come."""

    arrives: bool = False
    lost: str = ""
    """Where its graph is lost, as messages write it."""


class Unknown(Exception):
    """The text does not tell."""


def untrained(text: Text, loss: Any, trains: Trains) -> Iterator[ConstantTerm]:
    """Yield the summands that have no graph though they are made of what trains, and nothing says that it is meant."""
    said = text.loss()
    if said is None or loss.grad_fn is None:
        return
    every = [*summands(text, said, loss.grad_fn, text.frame.f_lineno)][:MOST_TERMS]
    lost = [one for one, node in every if node is None]
    texts = [ast.unparse(one) for one, _ in every]
    for one in lost:
        others = [each for at, each in zip(texts, (node for node, _ in every), strict=True) if at != ast.unparse(one)]
        if isinstance(one, ast.Name) and any(one.id in map(_id, ast.walk(each)) for each in others):
            continue  # as the largest of logits, taken off and added again
        if any(each is not one and _says_so(each) for each in others):
            continue  # a value that replaces another one, whose gradient is taken
        try:
            way = follow(one, _of_frame(text), trains, 0)
        except Unknown:
            continue
        if way.arrives and way.lost:
            yield ConstantTerm(line=text.line(_first(text, one)), name=ast.unparse(one)[:60], made=way.lost)


def summands(text: Text, said: ast.expr, node: Any, before: int, depth: int = 0) -> Iterator[tuple[ast.expr, Any]]:
    """Yield the summands in the text, each with the node of the graph that has computed it; None: it has no graph."""
    if node is None or depth > MOST_TERMS:
        yield said, node
        return
    edges = [one for one, _ in node.next_functions]
    made = type(node).__name__.partition("Backward")[0]
    match said:
        case ast.BinOp(left, ast.Add() | ast.Sub(), right) if made in ("Add", "Sub") and len(edges) == 2:
            yield from summands(text, left, edges[0], before, depth + 1)
            yield from summands(text, right, edges[1], before, depth + 1)
        case ast.BinOp(left, ast.Mult() | ast.Div(), right) if made in ("Mul", "Div") and edges.count(None) == 1:
            alone = next(one for one in edges if one is not None)
            yield from summands(text, left if edges[0] is alone else right, alone, before, depth + 1)
        case ast.Name(name):
            yield from _named(text, name, node, before, depth)
        case _:
            yield said, node


def _named(text: Text, name: str, node: Any, before: int, depth: int) -> Iterator[tuple[ast.expr, Any]]:
    made = text.made(name, before)
    last = made[0] if made and not _inside_a_branch(text, made[0]) else None
    if isinstance(last, ast.Assign) and all(isinstance(one, ast.Name) for one in last.targets):
        value = known(text.frame, ast.Name(name))
        if len(made) == 1 or name not in map(_id, ast.walk(last.value)):
            same = not isinstance(value, Tensor) or value.grad_fn is node or depth > 0
            if same:
                yield from summands(text, last.value, node, last.lineno - 1, depth + 1)
                return
    yield ast.Name(name), node


def follow(said: ast.expr, scope: Scope, trains: Trains, depth: int) -> Way:
    """How what trains comes into the value of an expression; raises where the text does not tell."""
    if depth > MOST_NESTED or isinstance(said, BRANCHES):
        raise Unknown
    if _says_cut(said):
        return Way()  # by name, as it may be meant
    match said:
        case ast.Name(name):
            return _of_name(name, said, scope, trains, depth)
        case ast.Attribute(_, name) if name in ABOUT:
            return Way()
        case ast.Call():
            return _of_call(said, scope, trains, depth)
    parts = [one for one in ast.iter_child_nodes(said) if isinstance(one, ast.expr)]
    way = _joined([follow(one, scope, trains, depth + 1) for one in parts])
    compares = isinstance(said, ast.Compare) and way.arrives and not way.lost
    return Way(arrives=True, lost=ast.unparse(said)[:60]) if compares else way


def _joined(ways: list[Way]) -> Way:
    """Where it arrives on a way without loss, the sum would have a graph: something unknown takes it."""
    arriving = [one for one in ways if one.arrives]
    if arriving and any(not one.lost for one in arriving):
        return Way(arrives=True)
    return arriving[0] if arriving else Way()


def _of_name(name: str, said: ast.Name, scope: Scope, trains: Trains, depth: int) -> Way:
    if name in scope.given or trains(scope.value(said)):
        return Way(arrives=True)
    made = scope.made.get(name)
    if made is not None:
        rest = {one: each for one, each in scope.made.items() if one != name}
        try:
            return follow(made, Scope(scope.value, rest, scope.given), trains, depth + 1)
        except Unknown:
            return Way()  # no way is known
    return Way()


def _of_call(said: ast.Call, scope: Scope, trains: Trains, depth: int) -> Way:
    name, function = name_of(said), scope.value(said.func)
    if name in LIKE:
        return Way()
    given = [*said.args, *(one.value for one in said.keywords)]
    ways = [follow(one, scope, trains, depth + 1) for one in given]
    if isinstance(function, FunctionType) and not is_foreign(function.__code__.co_filename):
        return _inside(function, said, ways, trains, depth)
    if trains(function) or (isinstance(said.func, ast.Name) and name in scope.given):
        ways.append(Way(arrives=True))
    elif isinstance(said.func, ast.Attribute) and not isinstance(scope.value(said.func.value), ModuleType):
        if not hasattr(Tensor, name):
            raise Unknown
        ways.append(follow(said.func.value, scope, trains, depth + 1))
    elif function is None and not hasattr(builtins, name):
        raise Unknown
    way = _joined(ways)
    bare = name == "grad" and not any(one.arg in ("create_graph", None) for one in said.keywords) and len(said.args) < 5
    if way.arrives and not way.lost and (bare or name in STEPS):
        return Way(arrives=True, lost="torch.autograd.grad(...) without create_graph=True" if bare else f"{name}()")
    return way


def _inside(function: FunctionType, said: ast.Call, ways: list[Way], trains: Trains, depth: int) -> Way:
    """The same of a function of the program that has one way through it and one result."""
    code = function.__code__
    found = nodes_of(parsed(code.co_filename), ast.FunctionDef)
    body = next((one for one in found if (one.name, one.lineno) == (code.co_name, code.co_firstlineno)), None)
    returns = [] if body is None else [one for one in ast.walk(body) if isinstance(one, ast.Return)]
    if body is None or body.decorator_list or len(returns) != 1 or body.body[-1] is not returns[0]:
        raise Unknown
    if any(isinstance(one, ast.With) and _rests(one) for one in ast.walk(body)) or returns[0].value is None:
        raise Unknown
    names = [*(one.arg for one in body.args.args)][: len(said.args)] + [one.arg or "" for one in said.keywords]
    arriving = [name for name, way in zip(names, ways, strict=False) if way.arrives]
    lost = [way.lost for way in ways if way.arrives]
    if any(lost) and not all(lost):
        raise Unknown
    made = _made(body)
    inner = {one.arg for one in (*body.args.args, *body.args.kwonlyargs)} | made.keys()
    free = dict(zip(code.co_freevars, function.__closure__ or (), strict=False))

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Name(name):
                if name in inner:
                    return None
                return _content(free[name]) if name in free else function.__globals__.get(name)
            case ast.Attribute(of, name):
                return getattr(value(of), "__dict__", {}).get(name)
        return None

    way = follow(returns[0].value, Scope(value, made, frozenset(arriving)), trains, depth + 1)
    return Way(arrives=True, lost=next(iter(lost))) if way.arrives and any(lost) else way


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _made(body: ast.AST) -> dict[str, ast.expr | None]:
    """What has made each name of a function, where that is one assignment outside of any branch."""
    found: dict[str, ast.expr | None] = {}
    top = {id(one) for one in getattr(body, "body", ())}
    for one in ast.walk(body):
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            found[one.id] = None
    for one in ast.walk(body):
        if isinstance(one, ast.Assign) and id(one) in top:
            for name in (each for at in one.targets for each in ast.walk(at) if isinstance(each, ast.Name)):
                stores = sum(isinstance(at, ast.Name) and at.id == name.id and _stores(at) for at in ast.walk(body))
                found[name.id] = one.value if stores == 1 else None
    return found


def _of_frame(text: Text) -> Scope:
    """The names of the function that goes backward, each of which is made in one place, outside of branches."""
    names = {one.id for one in ast.walk(text.body) if isinstance(one, ast.Name) and _stores(one)}
    found: dict[str, ast.expr | None] = {}
    for name in names:
        stores = [one for one in ast.walk(text.body) if isinstance(one, ast.Name) and one.id == name and _stores(one)]
        made = text.made(name, text.frame.f_lineno)
        one = made[0] if len(made) == len(stores) == 1 and isinstance(made[0], ast.Assign) else None
        clear = one is not None and not _inside_a_branch(text, one)
        found[name] = one.value if one is not None and clear else None
        if not stores or (not made and known(text.frame, ast.Name(name)) is not None):
            found.pop(name)  # what a loop or a with gives: batches
    return Scope(lambda node: known(text.frame, node), found)


def _inside_a_branch(text: Text, node: ast.AST) -> bool:
    """Return whether it stands in an ``if``, or in a ``with`` that records nothing, which begins in its function."""
    around = (one for one in ast.walk(text.body) if isinstance(one, ast.If | ast.With | ast.Try))
    branches = (one for one in around if not isinstance(one, ast.With) or _rests(one))
    main = (one for one in branches if not (isinstance(one, ast.If) and "__main__" in ast.unparse(one.test)))
    return any(each is node for one in main for each in ast.walk(one))


def _rests(node: ast.With) -> bool:
    return any(any(name in ast.unparse(one.context_expr) for name in RESTS) for one in node.items)


def _stores(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def _id(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _says_cut(node: ast.AST) -> bool:
    """Return whether it takes the graph away by name."""
    if isinstance(node, ast.Attribute):
        return node.attr == "data"
    return isinstance(node, ast.Call) and name_of(node) in (*CUTS, "no_grad")


def _says_so(node: ast.AST) -> bool:
    return any(map(_says_cut, ast.walk(node)))


def _first(text: Text, said: ast.expr) -> ast.AST:
    """Where a summand is made."""
    if isinstance(said, ast.Name):
        return next(iter(text.made(said.id, text.frame.f_lineno)), said)
    return said


def trains_of(trained: set[int], graph: Callable[[Any], list[Any]]) -> Trains:
    """Asks of anything whether it is a weight that a loss trains, a module that has one, or computed from one."""

    def trains(value: Any) -> bool:
        if isinstance(value, nn.Module):
            return any(id(param) in trained for param in value.parameters())
        if not isinstance(value, Tensor):
            return False
        leaves = graph(value.grad_fn) if value.grad_fn is not None else []
        return id(value) in trained or any(id(getattr(one, "variable", None)) in trained for one in leaves)

    return trains
