"""What the text of a program says that nobody means: methods that are named alone, results that nobody takes."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

from prepkit.observe.prepared.around import known, name_of, nodes_of, own_frames, parsed


def said() -> dict[str, Any]:
    """Fields of ``ValueFacts``, of the files whose functions run."""
    frames = own_frames()
    files = dict.fromkeys(one.f_code.co_filename for one in frames)
    unused = dict.fromkeys(found for one in files for found in _unused(parsed(one), Path(one).name))
    unused |= dict.fromkeys(found for one in frames for found in _data_unused(one))
    return {
        "not_called": tuple(_not_called(files)),
        "none_given": tuple(found for one in files for found in _nones_of(parsed(one), Path(one).name)),
        "unused": tuple(unused),
        "ranked": tuple(found for one in files for found in _ranked(parsed(one), Path(one).name)),
    }


def _not_called(files: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield lines that name a method and do not call it: ``model.eval``."""
    for file in files:
        for one in nodes_of(parsed(file), ast.Expr):
            match one:
                case ast.Expr(value=ast.Attribute(attr=name)) if name in DOING:
                    yield f"{Path(file).name}:{one.lineno}", ast.unparse(one.value)


@lru_cache(maxsize=16)  # it is asked before each step
def _nones_of(tree: ast.AST, file: str) -> tuple[tuple[str, str, str], ...]:
    """Lines that give on what changes a list, a set or a table, which is None, and who takes it."""
    found = []
    kinds = {ast.unparse(one.targets[0]): _collection(one.value) for one in nodes_of(tree, ast.Assign)}
    stored = Counter(ast.unparse(target) for one in nodes_of(tree, ast.Assign) for target in one.targets)
    for one in nodes_of(tree, ast.Call, ast.Assign):
        for taker, value in _given_on(one):
            match value:
                case ast.Call(func=ast.Attribute(value=held, attr=name)):
                    said = ast.unparse(held)
                    kind = _collection(held) or (kinds.get(said) if stored[said] == 1 else None)
                    if kind is not None and name in CHANGES[kind]:
                        found.append((f"{file}:{value.lineno}", taker, ast.unparse(value)))
    return tuple(found)


def _given_on(node: ast.Call | ast.Assign) -> Iterator[tuple[str, ast.expr]]:
    """Yield what a call is given, by name where it has one, or a name that is for use."""
    match node:
        case ast.Call(args=args, keywords=named):
            yield from ((ast.unparse(node.func), one) for one in args)
            yield from ((one.arg or ast.unparse(node.func), one.value) for one in named)
        case ast.Assign(targets=[ast.Name(name)], value=value) if not name.startswith("_"):
            yield name, value


def _collection(node: ast.expr) -> type | None:
    """The class of what is written as a list, a set or a table; None: it is none of them."""
    match node:
        case ast.List() | ast.ListComp() | ast.Call(func=ast.Name("list" | "sorted")):
            return list
        case ast.Set() | ast.SetComp() | ast.Call(func=ast.Name("set")):
            return set
        case ast.Dict() | ast.DictComp() | ast.Call(func=ast.Name("dict")):
            return dict
    return None


CHANGES: dict[type, frozenset[str]] = {
    list: frozenset({"append", "extend", "insert", "remove", "clear", "reverse", "sort"}),
    set: frozenset({"add", "update", "discard", "remove", "clear"}),
    dict: frozenset({"update", "clear"}),
}
"""Methods that return None."""
DOING = frozenset({"eval", "train", "zero_grad", "step", "backward", "update", "barrier", "close", "flush"})
"""Methods whose name alone does nothing."""


# --- results that nobody takes ---


@lru_cache(maxsize=16)
def _unused(tree: ast.AST, file: str) -> tuple[tuple[str, str], ...]:
    """Lines whose only call gives something new and changes nothing, and the call: ``x.clamp(0, 1)``."""
    return tuple((f"{file}:{line}", text) for line, _, name, text in _statements(tree) if name in GIVES)


def _data_unused(frame: FrameType) -> Iterator[tuple[str, str]]:
    """Likewise of data sets that are known here, each of whose methods gives another: ``data.shuffle()``."""
    file = frame.f_code.co_filename
    for line, owner, name, text in _statements(parsed(file)):
        home = type(known(frame, owner)).__module__ if name in DATA_GIVES else ""
        if home.startswith(DATA):
            yield f"{Path(file).name}:{line}", text


@lru_cache(maxsize=16)
def _statements(tree: ast.AST) -> tuple[tuple[int, ast.expr, str, str], ...]:
    """Calls of methods that are statements of their own: the line, of what, the method, and the text."""
    found = []
    for one in nodes_of(tree, ast.Expr):
        match one:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr=name), keywords=named) as call):
                if not {"out", "inplace"} & {key.arg for key in named}:
                    found.append((one.lineno, owner, name, ast.unparse(call)))
    return tuple(found)


# --- an order for ranks ---


@lru_cache(maxsize=16)
def _ranked(tree: ast.AST, file: str) -> tuple[tuple[str, str, str], ...]:
    """Lines that count with what an ``argsort`` has given, which says who stands at each place: the name, and its line.

    What an ``argsort`` of an ``argsort`` gives are the places.
    """
    found: dict[str, tuple[str, str, str]] = {}
    for function in nodes_of(tree, ast.FunctionDef, ast.Module):
        stored = Counter(one.id for one in ast.walk(function) if isinstance(one, ast.Name) and _is_store(one))
        orders: dict[str, int] = {}
        for one in ast.walk(function):
            match one:
                case ast.Assign(targets=[ast.Name(name)], value=ast.Call() as call):
                    sorts = [each for each in ast.walk(call) if isinstance(each, ast.Call) and name_of(each) == SORTS]
                    if name_of(call) == SORTS and len(sorts) == 1 and stored[name] == 1:
                        orders[name] = one.lineno
        for one in ast.walk(function) if orders else ():
            name = _counted(one)
            if name in orders:
                found.setdefault(name, (f"{file}:{getattr(one, 'lineno', 0)}", name, f"{file}:{orders[name]}"))
    return tuple(found.values())


def _is_store(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _counted(node: ast.AST) -> str:
    """The name with which an expression counts in fractions; empty: it does not."""
    match node:
        case ast.BinOp(left=ast.Name(name), op=ast.Add() | ast.Sub() | ast.Mult(), right=ast.Constant(float())):
            return name
        case ast.BinOp(left=ast.Constant(float()), right=ast.Name(name)):
            return name
        case ast.BinOp(left=ast.Name(name), op=ast.Div()):
            return name
        case ast.Call(func=ast.Attribute(value=ast.Name(name), attr="float" | "double" | "log2" | "log1p")):
            return name
        case ast.Call(func=ast.Attribute(attr="log2" | "log1p"), args=[ast.Name(name)]):
            return name
        case ast.Call(func=ast.Attribute(attr="log2"), args=[ast.BinOp(left=ast.Name(name), right=ast.Constant())]):
            return name
    return ""


SORTS = "argsort"
GIVES = frozenset({
    *("clamp", "clip", "clamp_min", "clamp_max", "masked_fill", "masked_scatter", "index_fill", "index_copy"),
    *("index_add", "scatter_add", "nan_to_num", "unsqueeze", "squeeze", "lerp", "addcmul", "addcdiv", "renorm"),
    *("dropna", "fillna", "drop_duplicates", "sort_values", "reset_index", "astype"),
})  # fmt: skip
"""Methods of tensors that have a twin that changes its tensor, and of tables of pandas."""
DATA = ("datasets.", "torch.utils.data.", "torchdata.", "webdataset.")
DATA_GIVES = frozenset({
    *("shuffle", "map", "filter", "select", "sort", "shard", "with_format", "with_transform", "rename_column"),
    *("rename_columns", "remove_columns", "select_columns", "cast", "cast_column", "class_encode_column", "take"),
    *("add_column", "skip", "batch", "repeat", "train_test_split", "flatten", "sharding_filter"),
})  # fmt: skip
"""Methods that give another data set."""
