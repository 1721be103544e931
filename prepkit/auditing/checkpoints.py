"""What ``torch.load`` gives while a script runs, and what of a run that goes on is loaded."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from torch import nn

from prepkit.observe.prepared.around import known, nodes_of, own_frames, parsed, texts_of_program
from prepkit.observe.prepared.instead import around_calls
from prepkit.observe.prepared.optimizers import inner

COUNTS = frozenset({"epoch", "step", "global_step", "iteration", "iter", "it", "start_epoch", "epochs_run", "iter_num"})
"""Keys by which a checkpoint says how far it is."""


@define(eq=False)
class HeardLoads:
    """Listens inside ``on()``."""

    _optimizers: dict[str, None] = field(factory=dict)
    """Keys of what was loaded that have the state of an optimizer that has stepped."""
    _schedulers: dict[str, None] = field(factory=dict)
    _counts: dict[str, int] = field(factory=dict)
    """How far it was, by key."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        with around_calls(torch, "load", self._loads):
            yield

    def left(self, optimizer: Any, scheduler: Any) -> tuple[tuple[str, str], ...]:
        """Keys of a checkpoint that nobody has loaded, with whose state it is; none where the run does not go on."""
        found = []
        stateless = optimizer is not None and not getattr(inner(optimizer), "state", True)
        begun = () if stateless or not self._optimizers else tuple(_begun_anew(self._counts))
        if self._optimizers and stateless:
            found.append((next(iter(self._optimizers)), type(inner(optimizer)).__name__))
        if self._schedulers and scheduler is not None and getattr(scheduler, "last_epoch", None) == 0:
            found.append((next(iter(self._schedulers)), type(scheduler).__name__))
        return (*found, *begun) if found and _goes_on() else begun

    def _loads(self, plain: Any, *given: Any, **named: Any) -> Any:
        result = plain(*given, **named)
        for key, value in result.items() if isinstance(result, Mapping) else ():
            if key in COUNTS and type(value) is int:
                self._counts[key] = value
            for one in value if isinstance(value, list | tuple) else (value,):
                if isinstance(one, Mapping) and one.get("state") and one.get("param_groups"):
                    self._optimizers[str(key)] = None
                elif isinstance(one, Mapping) and isinstance(one.get("last_epoch"), int) and one["last_epoch"] > 0:
                    self._schedulers[str(key)] = None
        return result


def _begun_anew(counts: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield keys, twice, by which a checkpoint is further than what the program calls so, and which it never reads."""
    read = _counts_read() if counts else set()
    held = [
        pair for one in (own_frames() if counts else ()) for pair in (*one.f_locals.items(), *one.f_globals.items())
    ]
    for key, value in counts.items():
        if key not in read and any(name == key and type(one) is int and one < value - 1 for name, one in held):
            yield key, key


def _goes_on() -> bool:
    """Return whether the program reads how far a checkpoint is: ``checkpoint["epoch"]``."""
    return bool(_counts_read())


def _counts_read() -> set[str]:
    every = (one for file in texts_of_program() for one in nodes_of(parsed(file), ast.Subscript, ast.Call))
    return {key for one in every if (key := _key(one)) in COUNTS}


def _key(node: ast.AST) -> str:
    """What something is read by; empty: it is no such expression."""
    match node:
        case ast.Subscript(slice=ast.Constant(value=str(key)), ctx=ast.Load()):
            return key
        case ast.Call(func=ast.Attribute(attr="get" | "pop"), args=[ast.Constant(value=str(key)), *_]):
            return key
    return ""


def kept_alive() -> Iterator[tuple[str, str]]:
    """Yield lines that keep ``model.state_dict()`` without a copy, to be loaded behind the loop; and the model's name.

    In loops that run now alone.
    """
    for frame in own_frames():
        tree = parsed(frame.f_code.co_filename)
        around = (one for one in nodes_of(tree, ast.For, ast.While) if _spans(one, frame.f_lineno))
        loaded = [*_loads_of(tree)]
        for loop in around:
            for name, owner, line in _kept(loop):
                model = known(frame, owner)
                behind = [at for who, what, at in loaded if (who, what) == (ast.unparse(owner), name)]
                outside = not all(_spans(loop, at) for at in behind)
                if outside and isinstance(model, nn.Module | None) and not _written(tree, name):
                    yield f"{Path(frame.f_code.co_filename).name}:{line}", ast.unparse(owner)


def _spans(loop: ast.stmt, line: int) -> bool:
    return loop.lineno <= line <= (loop.end_lineno or 0)


def _loads_of(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """Yield the owner, the argument and the line of every ``owner.load_state_dict(argument)``."""
    for one in nodes_of(tree, ast.Call):
        match one:
            case ast.Call(func=ast.Attribute(value=owner, attr="load_state_dict"), args=[what, *_]):
                yield ast.unparse(owner), ast.unparse(what), one.lineno


def _kept(loop: ast.For | ast.While) -> Iterator[tuple[str, ast.expr, int]]:
    """Yield names that are given a bare ``owner.state_dict()`` inside a loop, the owner, and the line."""
    for one in ast.walk(loop):
        if isinstance(one, ast.Assign):
            target, value = one.targets[0], one.value
            several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=False) if several else [(target, value)]  # type: ignore[attr-defined]
            for name, given in pairs:
                match given:
                    case ast.Call(func=ast.Attribute(value=owner, attr="state_dict"), args=[], keywords=[]):
                        yield ast.unparse(name), owner, one.lineno


def _written(tree: ast.AST, name: str) -> bool:
    """Return whether entries of it are written, or it is copied somewhere."""
    for one in nodes_of(tree, ast.Subscript, ast.Call):
        if isinstance(one, ast.Subscript) and isinstance(one.ctx, ast.Store) and ast.unparse(one.value) == name:
            return True
        if isinstance(one, ast.Call) and "copy" in ast.unparse(one.func) and name in map(ast.unparse, one.args):
            return True
    return False
