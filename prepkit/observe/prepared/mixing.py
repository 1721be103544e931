"""Weights of two models that a program mixes, as an average of weights is made: whether there are two of them."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, TypeGuard

from attrs import frozen
from torch import nn
from torch.optim.swa_utils import AveragedModel

from prepkit.objects import names, zero3
from prepkit.observe.prepared.around import (
    GATHERS,
    is_foreign,
    known,
    name_of,
    names_weights,
    nodes_of,
    outermost,
    own_frames,
    parsed,
    texts_of_program,
    ungathered,
)

MIXES = frozenset({"mul_", "add_", "sub_", "lerp_"})
WRITES = MIXES | {"copy_", "clamp_", "clip_", "div_", "zero_", "fill_", "normal_"}
WEIGHTS = frozenset({"parameters", "named_parameters", "state_dict"})
"""Methods of a model that give its weights."""


def mixes_empty(model: nn.Module) -> tuple[str, ...]:
    """Where the caller writes into weights that ZeRO-3 has empty, as a momentum copy does, and nothing gathers them.

    In a loop over a ``zip`` of two modules in any of its files, of which what copies alone is how a copy begins; or in
    lines that a function of it has still to come to.
    """
    root = names.unwrap_root(model)[-1]
    if not any(map(zero3.is_partitioned, root.parameters())):
        return ()
    homes = (getattr(sys.modules.get(type(one).__module__), "__file__", None) or "<" for one in root.modules())
    files = (*(one.f_code.co_filename for one in own_frames()), *(home for home in homes if not is_foreign(home)))
    found: dict[str, None] = {}
    for file in dict.fromkeys(files):
        for loop in ungathered(parsed(file)):
            if isinstance(loop, ast.For) and _zips_weights(loop.iter):
                targets = {one.id for one in ast.walk(loop.target) if isinstance(one, ast.Name)}
                mixed = (one for node in loop.body for one in ungathered(node) if _mixes(one, targets))
                found.update((f"{Path(file).name}:{one.lineno}: {ast.unparse(one)}", None) for one in mixed)
    found.update((one, None) for frame in own_frames() for one in _writes_empty(frame))
    return tuple(found)


def writes_lost(model: nn.Module) -> tuple[str, ...]:
    """Likewise where it writes into what is gathered to be read, which DeepSpeed throws away."""
    if not any(map(zero3.is_partitioned, names.unwrap_root(model)[-1].parameters())):
        return ()
    met = {one for frame in own_frames() for one in _writes_empty(frame)}
    gathered = (one for frame in own_frames() for one in _writes_empty(frame, _keeps))
    return tuple(dict.fromkeys(one for one in gathered if one not in met))


def _writes_empty(frame: FrameType, inside: Callable[[str], Any] = GATHERS.search) -> Iterator[str]:
    """Yield statements that a function has still to come to, or comes to again, and that write into such a weight."""
    code, tree = frame.f_code, parsed(frame.f_code.co_filename)
    lines = outermost(code, frame.f_lineno)[0], max((line for _, _, line in code.co_lines() if line), default=0)
    coming = [one for one in ungathered(tree, inside) if lines[0] <= getattr(one, "lineno", 0) <= lines[1]]
    made: dict[str, ast.expr] = {}
    for one in coming:
        match one:
            case ast.Assign(targets=[ast.Name(name)], value=ast.Attribute() as value):
                made[name] = value
    for loop in (one for one in coming if isinstance(one, ast.For) and names_weights(one.iter, "param")):
        made |= {one.id: loop.iter for one in ast.walk(loop.target) if isinstance(one, ast.Name)}
    for one in coming:
        weight = _written_into(one)
        weight = made.get(weight.id, weight) if isinstance(weight, ast.Name) else weight
        if weight is not None and any(map(zero3.is_partitioned, _weights(frame, weight))):
            yield f"{Path(code.co_filename).name}:{getattr(one, 'lineno', 0)}: {ast.unparse(one)}"


def _keeps(context: str) -> bool:
    """Return whether it gathers parameters, and says whose writes all ranks get, as DeepSpeed asks of who writes."""
    call = ast.parse(context, mode="eval").body
    named = any(one.arg in (None, "modifier_rank") for one in getattr(call, "keywords", ()))
    named = named or len(getattr(call, "args", ())) > 1 or "GatheredParameters" not in context
    return named and GATHERS.search(context) is not None


def _weights(frame: FrameType, node: ast.expr) -> Iterable[Any]:
    """The weight that an expression stands for, or those of the model that it takes them from."""
    owner = next(_owners(node), None)
    model = None if owner is None else _part(frame, owner)
    return [_part(frame, node)] if owner is None else model.parameters() if isinstance(model, nn.Module) else ()


def _written_into(node: ast.AST) -> ast.expr | None:
    """What a statement calls a method on that changes it in its place, or its data; None: it is no such statement."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return None
    inner: ast.expr = node.value
    while isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr in WRITES:
        inner = inner.func.value
    plain = inner.value if isinstance(inner, ast.Attribute) and inner.attr == "data" else inner
    return None if inner is node.value else plain


def _part(frame: FrameType, node: ast.expr | None) -> Any:
    """What an expression stands for, modules and weights of modules among it; None: that is unknown."""
    if isinstance(node, ast.Attribute) and isinstance(owner := _part(frame, node.value), nn.Module):
        return {**owner.__dict__, **owner._modules, **owner._parameters}.get(node.attr)
    return None if node is None else known(frame, node)


def _zips_weights(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or name_of(node) != "zip":
        return False
    return sum(names_weights(one, "param") for one in node.args) > 1


def _mixes(node: ast.AST, targets: Container[str]) -> TypeGuard[ast.stmt]:
    """Return whether a statement writes what it computes into one of the targets, or into its data."""
    match node:
        case ast.Assign(targets=[ast.Attribute(value=ast.Name(name), attr="data")], value=ast.BinOp()):
            return name in targets
        case ast.Expr(value=ast.Call() as call):
            written = re.match(r"(\w+)\.(?!grad\b)", ast.unparse(call))
            inside = [*ast.walk(call)]
            calls = {one.attr for one in inside if isinstance(one, ast.Attribute)}
            computed = "copy_" in calls and any(isinstance(one, ast.BinOp) for one in inside)
            return written is not None and written[1] in targets and (computed or bool(MIXES & calls))
        case _:
            return False


@frozen
class Expression:
    """An expression of the program."""

    text: str
    file: str
    line: int


def mixes_itself() -> Iterator[tuple[str, str, str]]:
    """Yield lines of the program that mix the weights of a model with themselves, and both names of the model.

    Of a name that is a copy somewhere in the program nobody knows when; what is asked to be two is so.
    """
    frames, texts = own_frames(), texts_of_program()
    for file, text in texts.items():
        if not (any(f"{one}()" in text for one in WEIGHTS) and (".data" in text or any(one in text for one in MIXES))):
            continue
        tree = parsed(file)
        for loop, mixes, owners in _mixing(tree):
            said = [Expression(one, file, loop) for one in owners]
            pairs = _given(said, _function_of(tree, loop), texts)
            found = (pair for pair in pairs if _are_one(pair, frames))
            line = f"{Path(file).name}:{mixes}"
            yield from ((line, one.text, other.text) for one, other in islice(found, 1))


@lru_cache(maxsize=256)
def _mixing(tree: ast.AST) -> tuple[tuple[int, int, tuple[str, ...]], ...]:
    """By loop that mixes the weights of two models: its line, that of what mixes, and both as they are written."""
    apart = [one for one in nodes_of(tree, ast.If) if "is not" in ast.unparse(one.test)]
    asked = {id(inside) for one in apart for inside in ast.walk(one)}
    found: list[tuple[int, int, tuple[str, ...]]] = []
    for loop in (one for one in nodes_of(tree, ast.For) if id(one) not in asked):
        targets = {one.id for one in ast.walk(loop.target) if isinstance(one, ast.Name)}
        mixed = [one for node in loop.body for one in ast.walk(node) if _mixes(one, targets)]
        owners = dict.fromkeys(ast.unparse(one) for node in (loop.iter, *mixed) for one in _owners(node))
        if mixed and len(owners) == 2:
            found.append((loop.lineno, mixed[0].lineno, tuple(owners)))
    return tuple(found)


def _are_one(pair: tuple[Expression, Expression], frames: Sequence[FrameType]) -> bool:
    """Return whether both stand for models with the same parameters, and neither is a copy anywhere."""
    models = [_model(one, frames) for one in pair]
    params = [[*map(id, one.parameters())] if isinstance(one, nn.Module) else [] for one in models]
    return bool(params[0]) and params[0] == params[1] and not any(map(_is_copied, pair))


def _given(
    owners: list[Expression], function: Function | None, texts: Mapping[str, str]
) -> Iterator[tuple[Expression, Expression]]:
    """Yield both as they are; where they are given to a function, as each call of it gives them."""
    takes = [] if function is None else [one.arg for one in function.args.args]
    if function is None or not {one.text for one in owners} & set(takes):
        yield owners[0], owners[1]
        return
    for file, text in texts.items():
        for call in nodes_of(parsed(file), ast.Call) if f"{function.name}(" in text else ():
            if name_of(call) == function.name:
                told = dict(zip(takes[takes[:1] == ["self"] :], map(ast.unparse, call.args), strict=False))
                told |= {one.arg: ast.unparse(one.value) for one in call.keywords if one.arg}
                one, other = (Expression(told.get(each.text, each.text), file, call.lineno) for each in owners)
                yield one, other


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> tuple[Function, ...]:
    """Those of a tree of ``parsed``."""
    return nodes_of(tree, ast.FunctionDef, ast.AsyncFunctionDef)


def _function_of(tree: ast.AST, line: int) -> Function | None:
    """The innermost function around a line."""
    around = [one for one in functions(tree) if one.lineno <= line <= (one.end_lineno or 0)]
    return max(around, key=lambda one: one.lineno, default=None)


def _model(said: Expression, frames: Sequence[FrameType]) -> Any:
    """What an expression stands for where the program is: in its own function, in its file, or in its object."""
    node, function = ast.parse(said.text, mode="eval").body, _function_of(parsed(said.file), said.line)
    for frame in (one for one in frames if one.f_code.co_filename == said.file):
        code = frame.f_code
        inside = function is None or (code.co_name == function.name and code.co_firstlineno <= said.line)
        own = said.text.partition(".")[0] in ("self", *(frame.f_globals if frame.f_locals is frame.f_globals else ()))
        local = function is not None and said.text in _written(function)
        if (inside or (own and not local)) and isinstance(found := known(frame, node), nn.Module):
            return found
    return None


def _written(function: ast.AST) -> set[str]:
    """What a function writes to."""
    return {ast.unparse(target) for target, _ in _assigned(function)}


def _assigned(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    for one in ast.walk(tree):
        if isinstance(one, ast.Assign):
            yield from ((target, one.value) for target in one.targets)


def _is_copied(said: Expression) -> bool:
    """Return whether it gets several values in its function, else in its file, and one of them is a copy."""
    tree = parsed(said.file)
    function = _function_of(tree, said.line)
    scope = function if function is not None and said.text in _written(function) else tree
    values = [value for target, value in _assigned(scope) if ast.unparse(target) == said.text]
    return len(values) > 1 and any("copy" in ast.unparse(one) for one in values)


def _owners(node: ast.AST) -> Iterator[ast.expr]:
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in WEIGHTS:
            yield one.func.value


RESTS = re.compile(
    r"(^|_)(ref|reference|teacher|ema|average|averaged|frozen|old|momentum|anchor)(_?(model|net|network|policy|actor))?$"
    r"|(^|_)target_?(model|net|network|policy|actor|critic)$|(_|^)(q|critic|actor|policy)_?target$"
)
"""Names of a model that is not to change as another one trains."""


def aliased() -> Iterator[tuple[str, str]]:
    """Yield names of the program of which one is for a model that rests, and that are one model that trains.

    What is to be brought to the weights of another by ``load_state_dict`` rests too, whatever its name.
    """
    for frame in own_frames():
        for one, other in _loaded(parsed(frame.f_code.co_filename)):
            if isinstance(model := known(frame, one), nn.Module) and model is known(frame, other):
                yield ast.unparse(one), ast.unparse(other)
        named: dict[int, list[str]] = {}
        for name, value in {**frame.f_globals, **frame.f_locals}.items():
            if isinstance(value, nn.Module) and any(one.requires_grad for one in value.parameters()):
                named.setdefault(id(value), []).append(name)
        for names_of_one in named.values():
            rests = [name for name in names_of_one if RESTS.search(name.lower())]
            if others := [name for name in names_of_one if name not in rests]:
                yield from ((name, others[0]) for name in rests)


def _loaded(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield models that are given the weights of another, and whose these are."""
    for one in nodes_of(tree, ast.Call):
        match one:
            case ast.Call(
                func=ast.Attribute(value=model, attr="load_state_dict"),
                args=[ast.Call(func=ast.Attribute(value=other, attr="state_dict"))],
            ) if ast.unparse(model) != ast.unparse(other):
                yield model, other


def rebound() -> Iterator[str]:
    """Yield lines of a loop over the weights of two models that only bind a name: ``old = m * old + (1 - m) * new``."""
    for file, text in texts_of_program().items():
        for loop in nodes_of(parsed(file), ast.For) if "zip(" in text else ():
            if _zips_weights(loop.iter):
                targets = {one.id for one in ast.walk(loop.target) if isinstance(one, ast.Name)}
                for one in loop.body:
                    if isinstance(one, ast.Assign) and isinstance(name := one.targets[0], ast.Name):
                        read = {each.id for each in ast.walk(one.value) if isinstance(each, ast.Name)}
                        after = {each.id for each in ast.walk(ast.Module(loop.body, [])) if _reads(each, one)}
                        if name.id in targets and len(targets & read) > 1 and name.id not in after:
                            yield f"{Path(file).name}:{one.lineno}: {ast.unparse(one)}"


def _reads(node: ast.AST, behind: ast.stmt) -> TypeGuard[ast.Name]:
    """Return whether it is a name that is read behind a statement."""
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.lineno > (behind.end_lineno or 0)


def never_updated(alive: Sequence[Any]) -> Iterator[str]:
    """Yield the classes of averages that the program makes, and in none of its files updates."""
    made = [one for one in alive if issubclass(type(one), AveragedModel) and not int(one.n_averaged)]
    texts = [*texts_of_program().values()] if made else []
    for name in dict.fromkeys(type(one).__name__ for one in made):
        if any(name in text for text in texts) and not any("update_parameters" in text for text in texts):
            yield name


def averages(alive: Sequence[Any]) -> dict[str, Any]:
    """What is wrong with averages of weights, and with models that are to rest, as fields of ``WindowFacts``."""
    return {
        "mixed": tuple(mixes_itself()),
        "rebound": tuple(rebound()),
        "aliased": tuple(dict.fromkeys(aliased())),
        "never_updated": tuple(never_updated(alive)),
    }
