"""What a step computes and leaves: results that nobody reads or that are written over, and labels of mixed samples."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

from attrs import frozen
from torch import Size, Tensor, nn

from prepkit.auditing.given_back import TermOf
from prepkit.auditing.shapes import SHAPES
from prepkit.auditing.term_texts import Text
from prepkit.facts.terms import Dropped, HalfMixed, Overwritten
from prepkit.objects.alive import alive
from prepkit.objects.names import unwrap_root
from prepkit.observe.prepared.around import innermost, is_foreign, known, name_of, nodes_of, parsed

Graph = Callable[[Any], list[Any]]
MOST_SAMPLES = 1 << 16
"""Numbers of a result that there is one of for each sample."""
MOST_NAMES = 256
MOST_DEEP = 4
"""Names of names that are followed."""
TURNS = ("flip", "roll")
"""Methods that put other samples in the place of each."""
LIMITS = ("max", "maximum", "clamp", "clip", "abs")
"""Functions by which one sample keeps the larger part, so that its label may stand for both."""
_TERM_OF_EACH = re.compile(r"(?:^|_)(?:kld?|ldj|s?ld)(?:_|\d|$)|log_?(?:abs_?)?det", re.IGNORECASE)
"""Words for what is added to a loss, of which there is one for each sample."""
_TERM = re.compile(
    r"(?:^|_)(?:aux\w*|pen\w*|reg\w*|commit\w*|balance|vq)(?:_|\d|$)|" + _TERM_OF_EACH.pattern,
    re.IGNORECASE,
)
_SUMS = frozenset({"Mean", "Sum", "Neg", "Add", "Sub", "Rsub", "Clamp", "ClampMin", "Relu", "Maximum", "Stack", "Cat"})
_SUMS |= SHAPES


# --- results that nobody reads ---


def dropped(text: Text, loss: Any, trained: set[int], graph: Graph) -> Iterator[Dropped]:
    """Yield what was computed from what trains for this loss, as it seems, which does not contain it."""
    begin, line = _span(text)
    if any(isinstance(one, ast.Call) and name_of(one) in ("locals", "vars", "eval") for one in parts_of(text)):
        return
    inside = set(graph(loss.grad_fn))
    shapes = sorted(tuple(one.variable.shape) for one in inside if id(getattr(one, "variable", None)) in trained)
    for name, made in [*_bound(text, begin, line)][:MOST_NAMES]:
        value = known(text.frame, ast.Name(name))
        if isinstance(value, Tensor):
            is_left = _is_result(value, [*_names_of(text, name, made)]) and not _reads(text, name)
            is_apart = is_left and value.grad_fn not in inside and not _summed(value.grad_fn) & _summed(loss.grad_fn)
            if is_apart and _trains(graph(value.grad_fn), trained):
                yield Dropped(line=text.line(made), name=name, shape=tuple(value.shape))
        elif isinstance(value, dict | list | tuple) and len(value) == len(shapes) > 1:
            each = [*value.values()] if isinstance(value, dict) else [*value]
            if _are_weights(each, shapes) and not _reads(text, name, behind=made.end_lineno or 0):
                own = {node for one in each for node in graph(one.grad_fn)}
                if _trains(own, trained) and not any(node in inside for node in own if not hasattr(node, "variable")):
                    yield Dropped(line=text.line(made), name=name, shape=(), weights=len(each))


def parts_of(text: Text) -> Iterator[ast.AST]:
    """All nodes of the function that goes backward."""
    return ast.walk(text.body)


def _span(text: Text) -> tuple[int, int]:
    """The first line of the loop around the line that goes backward, or of the function; and that line."""
    begin, _ = innermost(text.frame.f_code, text.frame.f_lineno)
    return begin or text.frame.f_code.co_firstlineno, text.frame.f_lineno


def _bound(text: Text, begin: int, line: int) -> Iterator[tuple[str, ast.Assign]]:
    """Yield the names that are bound between these lines, each with the last statement that binds it."""
    whole = {name for one in parts_of(text) if isinstance(one, ast.Global | ast.Nonlocal) for name in one.names}
    assigned = [one for one in parts_of(text) if isinstance(one, ast.Assign) and begin <= one.lineno <= line]
    last: dict[str, ast.Assign] = {}
    for one in sorted(assigned, key=lambda one: one.lineno):
        last |= dict.fromkeys(_stored(one), one)
    yield from ((name, one) for name, one in last.items() if not name.startswith("_") and name not in whole)


def _stored(node: ast.AST) -> list[str]:
    return [one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]


def _loaded(node: ast.AST) -> list[str]:
    return [one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)]


def _reads(text: Text, name: str, behind: int = 0) -> bool:
    """Return whether the function reads a name behind a line, or one inside it does."""
    functions = (
        one for one in parts_of(text) if isinstance(one, ast.FunctionDef | ast.Lambda) and one is not text.body
    )
    if any(name in _loaded(one) for one in functions):
        return True
    loads = (one for one in parts_of(text) if isinstance(one, ast.Name) and one.id == name)
    return any(isinstance(one.ctx, ast.Load) and one.lineno > behind for one in loads) or any(
        isinstance(one, ast.AugAssign) and name in _stored(one.target) and one.lineno > behind for one in parts_of(text)
    )


def _names_of(text: Text, name: str, made: ast.Assign) -> Iterator[str]:
    """Yield the name of a result, and what the function of the program calls it that returns it."""
    yield name
    target, value = made.targets[0], made.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Call):
        for one in _returned(_function(text, value)):
            if isinstance(one, ast.Tuple) and len(one.elts) == len(target.elts):
                pairs = zip(target.elts, one.elts, strict=True)
                yield from (
                    given.id
                    for at, given in pairs
                    if isinstance(at, ast.Name) and at.id == name and isinstance(given, ast.Name)
                )


def _is_result(value: Tensor, called: list[str]) -> bool:
    """Return whether it is a term by its names, and a number, or one for each sample, that was computed from many."""
    if value.grad_fn is None or value.dim() > 1 or not 0 < value.numel() <= MOST_SAMPLES:
        return False
    if value.dim() == 1:
        return any(map(_TERM_OF_EACH.search, called))
    return any(map(_TERM.search, called)) and _reduces(value.grad_fn)


def _summed(node: Any) -> set[Any]:
    """The nodes whose results a result is a sum of, whatever they are multiplied by; a bound below them counts."""
    found, waiting = {node}, [node]
    while waiting and len(found) < MOST_NAMES:
        one = waiting.pop()
        before = [each for each, _ in one.next_functions if each is not None]
        name = type(one).__name__.partition("Backward")[0]
        if name in _SUMS or (name in ("Mul", "Div") and len(before) == 1):
            waiting += [each for each in before if each not in found]
            found |= {*before}
    return found


def _reduces(node: Any, depth: int = 0) -> bool:
    """Return whether a number is made of several, and not of one weight alone."""
    before = [one for one, _ in node.next_functions if one is not None]
    sizes = [Size(one._input_metadata[0].shape).numel() for one in before if getattr(one, "_input_metadata", None)]
    if any(size > 1 for size in sizes):
        return True
    return depth < 8 and any(_reduces(one, depth + 1) for one in before)


def _trains(every: Iterable[Any], trained: set[int]) -> bool:
    return any(id(getattr(one, "variable", None)) in trained for one in every)


def _are_weights(each: list[Any], shapes: list[tuple[int, ...]]) -> bool:
    """Return whether these are as many tensors with a graph as there are weights, of their shapes."""
    if not all(isinstance(one, Tensor) and one.grad_fn is not None for one in each):
        return False
    return sorted(tuple(one.shape) for one in each) == shapes


# --- terms of which the last is left ---


def overwritten(loss: Tensor, each: list[tuple[str, list[TermOf]]]) -> Iterator[Overwritten]:
    """Yield what modules of a class gave under one name, where that of the last is added to a loss, and no other lives.

    Who holds one of the others may use it yet.
    """
    told: set[int] = set()
    for method, terms in each:
        *before, last = terms
        modules = [module for one in terms if (module := one.module()) is not None]
        mark, left = last.mark(), any(one.mark() is not None for one in before)
        if mark is None or left or id(mark) in told or len(modules) < len(terms):
            continue
        name = last.names() if any(map(last.is_at, _summed(loss.grad_fn))) else ""
        alike = name and all(one.names() == name for one in before)
        if alike and (model := _model_of(modules)) is not None:
            told.add(id(mark))
            paths = {id(one): path for path, one in model.named_modules()}
            yield Overwritten(
                line=last.line,
                model=type(model).__name__,
                kind=type(modules[-1]).__name__,
                method=method,
                name=name,
                before=tuple(paths[id(one)] for one in modules[:-1]),
                last=paths[id(modules[-1])],
                shape=last.shape,
            )


def _model_of(modules: list[nn.Module]) -> nn.Module | None:
    """What the largest model that has all of these wraps; None: they are in none together."""
    wanted = {id(one) for one in modules}
    parts = ((one, {id(part) for part in one.modules()}) for one in alive(nn.Module))
    holding = [(len(inside), one) for one, inside in parts if wanted <= inside]
    whole = unwrap_root(max(holding, key=lambda one: one[0])[1]) if holding else ()
    return next((one for one in reversed(whole) if wanted <= {id(part) for part in one.modules()}), None)


# --- samples that were mixed ---


@frozen(eq=False)
class Mix:
    """An expression that mixes samples with others of their batch."""

    node: ast.expr
    samples: ast.expr
    others: ast.expr
    """The same samples in another order."""
    order: str
    """The name of their order, or the method that has changed it; empty: it has none."""
    share: str
    """The name of the part that each sample keeps."""


def half_mixed(text: Text) -> Iterator[HalfMixed]:
    """Yield the lines that mix samples whose labels stand in the loss as they were."""
    begin, line = _span(text)
    statements = [one for one in parts_of(text) if isinstance(one, ast.Assign) and begin <= one.lineno <= line]
    behind = _behind(text)
    for one in statements:
        found = _inline(text, one) or _by_function(text, one)
        if found is None:
            continue
        mixed, left = found
        labels = _labels(text, behind, mixed) if mixed in behind else ""
        if labels:
            yield HalfMixed(line=text.line(one), name=mixed, labels=labels, left=left)


def _inline(text: Text, made: ast.Assign) -> tuple[str, str] | None:
    """The name of samples that a statement mixes, and of their other labels that nobody reads; None: it mixes none."""
    pairs = _pairs(made.targets[0], made.value)
    found = [(name, mix) for name, value in pairs if (mix := _mix(value, text.body)) is not None]
    if len(found) != 1 or not _is_drawn(text.body, found[0][1].share):
        return None
    name, mix = found[0]
    left = _others_left(text.body, mix, text)
    return None if left is None else (name, left)


def _by_function(text: Text, made: ast.Assign) -> tuple[str, str] | None:
    """The same of a statement that calls a function of the program, which mixes and returns several."""
    target = made.targets[0]
    body = _function(text, made.value) if isinstance(made.value, ast.Call) else None
    returned = [*_returned(body)]
    if body is None or not isinstance(target, ast.Tuple) or len(returned) != 1:
        return None
    each = returned[0].elts if isinstance(returned[0], ast.Tuple) else []
    if len(each) != len(target.elts) or not all(isinstance(one, ast.Name) for one in target.elts):
        return None
    names = [one.id for one in target.elts if isinstance(one, ast.Name)]
    values = [_made(one, body) for one in each]
    mixes = [(at, mix) for at, value in enumerate(values) if (mix := _mix(value, body)) is not None]
    if len(mixes) != 1 or not _is_drawn(body, mixes[0][1].share):
        return None
    at, mix = mixes[0]
    permuted = [name for name, value in zip(names, values, strict=True) if value is not mix.node and _uses(value, mix)]
    if permuted:
        is_left = not any(name.startswith("_") is False and _reads(text, name) for name in permuted)
        return (names[at], permuted[0]) if is_left else None
    return (names[at], "") if _others_left(body, mix, None) == "" else None


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[str, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return [(one.id, of) for one, of in zip(target.elts, value.elts, strict=True) if isinstance(one, ast.Name)]
    return [(target.id, value)] if isinstance(target, ast.Name) else []


def _mix(node: ast.expr, body: ast.AST) -> Mix | None:
    """A sum of samples and the same in another order, by parts that are 1 together."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return None
    sides = [_part(one) for one in (node.left, node.right)]
    if None in sides:
        return None
    (one, first), (other, second) = (each for each in sides if each is not None)
    shares = [_share(first), _share(second)]
    if None in shares or shares[0] == shares[1] or {abs(each[1]) for each in shares if each} != {1}:
        return None
    (name, _), (same, _) = (each for each in shares if each is not None)
    for samples, others in ((one, other), (other, one)):
        order = _order(_made(others, body), samples)
        if order is not None and name == same:
            return Mix(node=node, samples=samples, others=others, order=order, share=name)
    return None


def _part(node: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """The samples and their factor."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return None
    left = _share(node.left)
    return (node.right, node.left) if left is not None else (node.left, node.right)


def _share(node: ast.expr) -> tuple[str, int] | None:
    """The name of a part, and 1; -1 where it is what is left of it."""
    match node:
        case ast.Name(name):
            return name, 1
        case ast.BinOp(ast.Constant(1 | 1.0), ast.Sub(), rest):
            inside = _share(rest)
            return None if inside is None or inside[1] < 0 else (inside[0], -1)
        case ast.Call(ast.Attribute(of, "view" | "reshape" | "to" | "unsqueeze")) | ast.Subscript(of):
            return _share(of)
    return None


def _order(node: ast.expr, samples: ast.expr) -> str | None:
    """The name of the order in which an expression gives the same samples; empty: it has no name; None: others."""
    said = ast.unparse(samples)
    match node:
        case ast.Subscript(of, ast.Name(name)) if ast.unparse(of) == said:
            return name
        case ast.Subscript(of, ast.Call() as call) if ast.unparse(of) == said and name_of(call) == "randperm":
            return ""
        case ast.Call(ast.Attribute(of, name)) if name in TURNS and ast.unparse(of) == said:
            return name
        case ast.Call(ast.Attribute(ast.Name("torch"), name), [of, *_]) if name in TURNS and ast.unparse(of) == said:
            return name
    return None


def _uses(node: ast.AST, mix: Mix) -> bool:
    """Return whether an expression has something in the order of these samples."""
    calls = (name_of(one) for one in ast.walk(node) if isinstance(one, ast.Call))
    return bool(mix.order) and (mix.order in _loaded(node) or mix.order in calls)


def _others_left(body: ast.AST, mix: Mix, text: Text | None) -> str | None:
    """Of what else a function puts in that order the name, where nobody reads it; empty: there is none; None: read."""
    own = {id(one) for each in (mix.node, mix.others) for one in ast.walk(each)}
    if isinstance(mix.others, ast.Name):
        own |= {id(one) for one in ast.walk(_made(mix.others, body))}
    found: list[str] = []
    for one in (each for each in ast.walk(body) if isinstance(each, ast.stmt)):
        if isinstance(one, ast.Assign):
            for name, value in _pairs(one.targets[0], one.value) or [("", one.value)]:
                if _has(value, mix, own):
                    found.append(name)
        elif _has(one if not hasattr(one, "body") else getattr(one, "test", ast.Pass()), mix, own):
            return None
    if any(not name or text is None or _reads(text, name) for name in found):
        return None
    return next(iter(found), "")


def _has(node: ast.AST, mix: Mix, own: set[int]) -> bool:
    for one in ast.walk(node):
        names = isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load) and one.id == mix.order
        if id(one) not in own and (names or (isinstance(one, ast.Call) and name_of(one) == mix.order)):
            return True
    return False


def _is_drawn(body: ast.AST, share: str) -> bool:
    """Return whether a part is drawn anew each time, and neither sample keeps the larger part on purpose."""
    made = [one.value for one in ast.walk(body) if isinstance(one, ast.Assign) and share in _stored(one)]
    calls = [name_of(one) for value in made for one in ast.walk(value) if isinstance(one, ast.Call)]
    return bool(calls) and not any(name in LIMITS for name in calls)


def _behind(text: Text) -> list[str]:
    """The names of what a loss is made of, as far as the function tells, the nearest first."""
    loss = text.loss()
    found: dict[str, None] = {}
    new = {} if loss is None else dict.fromkeys(_loaded(loss))
    for _ in range(MOST_DEEP):
        found |= new
        values = [one.value for name in new for one in text.made(name, text.frame.f_lineno) if one.value is not None]
        new = {name: None for value in values for name in _loaded(value) if name not in found}
    return [*found]


def _labels(text: Text, names: list[str], samples: str) -> str:
    """The first name among these of whole numbers, one for each sample; empty: there is none."""
    mixed = known(text.frame, ast.Name(samples))
    for name in names:
        value = known(text.frame, ast.Name(name))
        whole = isinstance(value, Tensor) and value.dim() and not value.is_floating_point()
        if whole and isinstance(mixed, Tensor) and len(value) == len(mixed) > 1:
            return name
    return ""


# --- functions of the program ---


def _function(text: Text, call: ast.Call) -> ast.FunctionDef | None:
    """The text of the function of the program that is called; of a module that of its ``forward``."""
    value = known(text.frame, call.func)
    if value is None and isinstance(call.func, ast.Attribute):
        value = getattr(type(known(text.frame, call.func.value)), call.func.attr, None)
    if not isinstance(value, FunctionType):
        value = getattr(type(value), "forward", None)
    if not isinstance(value, FunctionType) or is_foreign(value.__code__.co_filename):
        return None
    place = (value.__code__.co_name, value.__code__.co_firstlineno)
    found = nodes_of(parsed(value.__code__.co_filename), ast.FunctionDef)
    return next((one for one in found if (one.name, _first_line(one)) == place), None)


def _first_line(node: ast.FunctionDef) -> int:
    return min([node.lineno, *(one.lineno for one in node.decorator_list)])


def _returned(body: ast.AST | None) -> Iterator[ast.expr]:
    for one in ast.walk(body) if body is not None else ():
        if isinstance(one, ast.Return) and one.value is not None:
            yield one.value


def _made(node: ast.expr, body: ast.AST) -> ast.expr:
    """What a name stands for, where one statement binds it."""
    if not isinstance(node, ast.Name):
        return node
    made = [one for one in ast.walk(body) if isinstance(one, ast.Assign) and node.id in _stored(one)]
    pairs = _pairs(made[0].targets[0], made[0].value) if len(made) == 1 else []
    return next((value for name, value in pairs if name == node.id), node)
