"""Columns of a data set that the Trainer of transformers leaves out, though the program's own code reads them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from typing import Any

from prepkit.observe.prepared.around import frames_above, is_foreign, name_of, nodes, parsed

METHODS = ("compute_loss", "training_step")
"""Of a Trainer that read its inputs."""


def dropped_columns() -> tuple[tuple[str, str], ...]:
    """Lines of the program that read a column, and the column, which the Trainer whose loop runs has left out."""
    trainer = _trainer()
    names = getattr(getattr(trainer, "train_dataset", None), "column_names", None)
    if not isinstance(names, list) or not trainer.args.remove_unused_columns:
        return ()
    kept = getattr(trainer, "_signature_columns", None)
    if not kept:
        return ()
    dropped, found = set(names) - set(kept), dict[tuple[str, str], None]()
    readers = [*_readers(trainer)]
    written = {name for _, node in readers for name in _written(node)}
    for file, node in readers:
        for name, line in _read(node):
            if name in dropped - written:
                found[f"{file.rpartition('/')[2]}:{line}", name] = None
    return tuple(found)


def _trainer() -> Any:
    kind = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    owners = (one.f_locals.get("self") for one in (frames_above(__file__) if kind is not None else ()))
    return next((one for one in owners if isinstance(one, kind)), None)  # type: ignore[arg-type]


def _readers(trainer: Any) -> Iterator[tuple[str, ast.AST]]:
    """Yield functions of the program that are given a batch: of a Trainer, a collator and a model of its own."""
    collator = trainer.data_collator
    given = [getattr(type(trainer), name, None) for name in METHODS]
    given += [collator, vars(type(collator)).get("__call__"), getattr(type(trainer.model), "forward", None)]
    for function in given:
        code = getattr(function, "__code__", None)
        if code is not None and not is_foreign(code.co_filename):
            for node in nodes(parsed(code.co_filename)):
                first = min((one.lineno for one in getattr(node, "decorator_list", ())), default=0)
                if isinstance(node, ast.FunctionDef) and code.co_firstlineno in (node.lineno, first):
                    yield code.co_filename, node


def _read(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the constants by which something is read, with their lines."""
    for one in ast.walk(node):
        key: ast.AST | None = None
        if isinstance(one, ast.Subscript) and isinstance(one.ctx, ast.Load):
            key = one.slice
        elif isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and name_of(one) in ("pop", "get"):
            key = one.args[0] if one.args else None
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value, key.lineno


def _written(node: ast.AST) -> Iterator[str]:
    """Yield the constants under which something is written, as a collator makes a column anew."""
    for one in ast.walk(node):
        keys: list[Any] = one.keys if isinstance(one, ast.Dict) else []
        if isinstance(one, ast.Subscript) and isinstance(one.ctx, ast.Store):
            keys = [one.slice]
        yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
