"""What the Trainer of transformers makes of the program's own code: columns that it drops, losses that it divides."""

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


COUNT = "num_items_in_batch"
"""Argument by which a Trainer hands the tokens of all micro-batches of a step to a loss, which it then divides by."""


def undivided_loss() -> tuple[str, str, int]:
    """What makes a loss and leaves its count alone, its line, and by what its losses are too large.

    A ``compute_loss``, a ``forward`` or a ``compute_loss_func``. A Trainer whose model takes the count, or that has
    such a function, divides nothing by micro-batches, and multiplies by the ranks what its own ``compute_loss`` gives.
    Empty: the program's code counts, or there is none.
    """
    trainer = _trainer()
    given = getattr(trainer, "compute_loss_func", None)
    counts = given is not None or getattr(trainer, "model_accepts_loss_kwargs", False)
    divides = getattr(trainer, "loss_is_scaled_for_ga", None) is False
    if not counts or divides or not any(one.f_locals.get(COUNT) is not None for one in frames_above(__file__)):
        return "", "", 0
    micros, asks_model = trainer.args.gradient_accumulation_steps, given is None
    for file, node in _bodies(given) if micros > 1 else ():
        if not _counts(node):
            return node.name, f"{file.rpartition('/')[2]}:{node.lineno}", micros
    for file, node in _bodies(type(trainer).compute_loss):
        asks_model = "super" in _names(node)
        if not asks_model and micros > 1 and not _counts(node):
            return "compute_loss", f"{file.rpartition('/')[2]}:{node.lineno}", micros
    by = micros * (trainer.args.world_size if getattr(trainer.args, "average_tokens_across_devices", False) else 1)
    inside = getattr(trainer.model, "get_base_model", lambda: trainer.model)()  # of peft's wrapper
    for file, node in _bodies(type(inside).forward) if asks_model and by > 1 else ():
        if not _counts(node):
            return "forward", f"{file.rpartition('/')[2]}:{node.lineno}", by
    return "", "", 0


def _names(node: ast.AST) -> set[str]:
    every = [*ast.walk(node)]
    return {one.id for one in every if isinstance(one, ast.Name)} | {
        one.attr for one in every if isinstance(one, ast.Attribute)
    }


def _counts(node: ast.FunctionDef) -> bool:
    """Return whether it does something with the count, or with what else it is given, or divides by itself."""
    given = {COUNT, node.args.kwarg.arg if node.args.kwarg else COUNT}
    names = _names(node)
    return bool(given & names) or any("accumulation" in one for one in names)


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
        yield from _bodies(function)


def _bodies(function: Any) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the text of a function of the program's, with its file."""
    code = getattr(function, "__code__", None)
    if code is None or is_foreign(code.co_filename):
        return
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
    """Yield the constants under which a column is made anew: of what was not read under the same one."""
    pairs: list[tuple[ast.AST | None, ast.AST]] = []
    for one in ast.walk(node):
        match one:
            case ast.Dict(keys, values):
                pairs += zip(keys, values, strict=True)
            case ast.Assign(targets, value):
                pairs += [(one.slice, value) for one in targets if isinstance(one, ast.Subscript)]
    for key, made in pairs:
        if isinstance(key, ast.Constant) and key.value not in {name for name, _ in _read(made)}:
            yield str(key.value)
