"""Which parts of a source file may be mutated: code that acts, not what it says to people or to type checkers."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from attrs import evolve, frozen

MESSAGES = frozenset({"because", "fix", "message", "note", "reason", "source", "summary", "what", "why"})
"""Parameters and local names that hold text for people, or name the source of a statement."""
TALKS = {"Hit": 1, "because": 1, "refusal": 2, "Note": 0, "doc": 0}
"""Calls whose arguments from this position on are texts."""
SILENT = frozenset({"assert_never", "TypeVar", "cast", "getLogger", "overload"})
"""Calls that only a type checker hears, or that only happen when one was wrong."""


@frozen(kw_only=True)
class Site:
    """A node that may be mutated and what surrounds it."""

    node: ast.AST
    parent: ast.AST
    scope: str
    function: ast.FunctionDef | ast.AsyncFunctionDef | None
    """The innermost function around it."""
    statement: ast.stmt


def sites(tree: ast.Module) -> Iterator[Site]:
    """Every node that may be mutated, in source order."""
    for statement in tree.body:
        yield from _below(Site(node=statement, parent=tree, scope="", function=None, statement=statement), "")


def _below(site: Site, classes: str) -> Iterator[Site]:
    node = site.node
    if _is_silent(site):
        return
    yield site
    for name, child in _children(node):
        if _is_annotation(node, name) or _is_message(node, name, child):
            continue
        inner = evolve(site, node=child, parent=node)
        if isinstance(child, ast.stmt):
            inner = evolve(inner, statement=child)
        inside = name == "body"
        if isinstance(node, ast.ClassDef) and inside:
            yield from _below(inner, classes if site.scope else f"{classes}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and inside:
            scope = site.scope or f"{classes}{node.name}"
            yield from _below(evolve(inner, scope=scope, function=node), classes)
        else:
            yield from _below(inner, classes)


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else (value,):
            if isinstance(child, ast.AST):
                yield name, child


def _is_silent(site: Site) -> bool:
    """Whether nothing at or below the node is worth a mutant: what it does cannot be told from what it did."""
    match site.node:
        case ast.JoinedStr() | ast.Assert() | ast.Import() | ast.ImportFrom() | ast.Delete() | ast.Global():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Name(id=name))) | ast.Call(func=ast.Name(id=name)) if name in SILENT:
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.match_case(body=[ast.Expr(value=ast.Call(func=ast.Name(id="assert_never")))]):
            return True
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name == "__all__" or _is_type(site.node.value)
        case ast.AnnAssign(annotation=ast.Name(id="TypeAlias")):
            return True
        case ast.Constant(value=str() as text):
            return _for_people(text)
    return False


def _for_people(text: str) -> bool:
    return any(character.isspace() for character in text) or text.endswith((".", ":", ";"))


def _is_type(value: ast.AST) -> bool:
    """A union or generic alias on the right of ``Name = ...``."""
    match value:
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return _is_type(left) and _is_type(right)
        case ast.Subscript(value=ast.Name(id=name)):
            return name[0].isupper() or name in {"tuple", "dict", "list", "set", "frozenset", "type"}
        case ast.Name(id=name):
            return name in {"bool", "int", "float", "str", "object", "dict", "list", "tuple"} or name[0].isupper()
        case ast.Constant(value=None):
            return True
        case ast.Attribute(attr=name):
            return name[0].isupper()
    return False


def _is_annotation(node: ast.AST, name: str) -> bool:
    """Annotations, decorators, bases, patterns, targets, and the types that are caught or asked for."""
    if name in {"annotation", "returns", "decorator_list", "bases", "pattern", "targets", "target", "cause"}:
        return True
    if isinstance(node, ast.ClassDef) and name == "keywords":
        return True
    return isinstance(node, ast.ExceptHandler) and name == "type"


def _is_message(node: ast.AST, name: str, child: ast.AST) -> bool:
    match node:
        case ast.keyword(arg=arg):
            return arg in MESSAGES
        case ast.Assign(targets=[ast.Name(id=target)]) if name == "value":
            return target in MESSAGES and not isinstance(child, ast.IfExp)
        case ast.Call(func=ast.Name(id=called), args=args):
            if called == "isinstance":
                return name == "args" and child is args[-1]
            return called in TALKS and name == "args" and child in args[TALKS[called] :]
    return False
