"""What the program's own text says a loss is the sum of, and what the names in it stand for as it goes backward."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

from attrs import frozen
from torch import Tensor, nn

from prepkit.facts.terms import ConstantTerm, OddDivergence
from prepkit.observe.prepared.around import is_of_library, known, name_of, nodes_of, parsed

MOST_TERMS = 32
MOST_DEEP = 6
"""Names of names that are followed."""
MOST_HELD = 64
"""Of a list, such as one of log-probabilities, that are looked at."""
MOST_VALUES = 1 << 16
"""Of a divergence that is averaged in the loss."""
CLOSED = 48
"""Nodes of the graph of a divergence that are looked at."""
FAR = 1e-3
"""How far on the wrong side of zero a divergence is, past rounding."""
CUTS = ("item", "detach", "tolist", "numpy")
"""Methods that take the graph away."""
_KL = re.compile(r"(?:^|_)kld?(?:iv|oss)?(?:_|\d|$)", re.IGNORECASE)
_WEIGHTS = frozenset({"parameters", "named_parameters", "weight"})
_SUMS = frozenset({"Mean", "Sum", "Neg", "Add", "Sub", "Rsub", "Mul", "Div", "View", "ReshapeAlias", "Clamp", "ToCopy"})


@frozen(eq=False)
class Summand:
    """One of the summands of a loss in the text: the factors that are no plain numbers, and its sign."""

    factors: tuple[ast.expr, ...]
    sign: float


@frozen(eq=False)
class Text:
    """The function of a program that goes backward."""

    frame: FrameType
    body: ast.AST

    def terms(self) -> list[Summand]:
        """What the loss is the sum of, as far as names and sums say it; nothing: that is not known."""
        loss = self.loss()
        found = [] if loss is None else [*self._summands(loss, 1.0, self.frame.f_lineno, 0)]
        return found[:MOST_TERMS]

    def line(self, node: ast.AST) -> str:
        """Of a node, as messages write it."""
        return f"{Path(self.frame.f_code.co_filename).name}:{getattr(node, 'lineno', 0)}"

    def made(self, name: str, before: int) -> list[ast.Assign | ast.AugAssign | ast.AnnAssign]:
        """The assignments of a name alone above a line of this function, the last one first."""
        assigned = (one for one in own_nodes(self.body) if isinstance(one, ast.Assign | ast.AugAssign | ast.AnnAssign))
        found = [one for one in assigned if one.lineno <= before and _assigns(one, name)]
        return sorted(found, key=lambda one: one.lineno, reverse=True)

    def loss(self) -> ast.expr | None:
        """What goes backward in the line that runs."""
        for call in (one for one in own_nodes(self.body) if isinstance(one, ast.Call) and name_of(one) == "backward"):
            if call.lineno <= self.frame.f_lineno <= (call.end_lineno or 0) and isinstance(call.func, ast.Attribute):
                given = call.args[0] if call.args else call.func.value
                scales = isinstance(given, ast.Call) and name_of(given) in ("scale", "scale_loss") and given.args
                return given.args[0] if scales and isinstance(given, ast.Call) else given
        return None

    def _summands(self, node: ast.expr, sign: float, before: int, depth: int) -> Iterator[Summand]:
        match node:
            case ast.BinOp(left, ast.Add() | ast.Sub(), right):
                yield from self._summands(left, sign, before, depth)
                yield from self._summands(right, -sign if isinstance(node.op, ast.Sub) else sign, before, depth)
            case ast.UnaryOp(ast.USub(), inside):
                yield from self._summands(inside, -sign, before, depth)
            case ast.BinOp(left, ast.Mult() | ast.Div(), right):
                yield from self._product(left, right, sign, before, depth)
            case ast.Name(name):
                chain = _chain(self.made(name, before), name) if depth < MOST_DEEP else []
                value = known(self.frame, node)
                grows = isinstance(value, Tensor) and value.requires_grad and not _KL.search(name)
                if not chain or (depth and not (grows and any(map(_is_sum, chain)))):
                    yield Summand((node,), sign)
                    return
                for one in chain:
                    adds = not isinstance(one, ast.AugAssign) or isinstance(one.op, ast.Add | ast.Sub)
                    turned = -sign if isinstance(one, ast.AugAssign) and isinstance(one.op, ast.Sub) else sign
                    if adds:
                        yield from self._summands(one.value, turned, one.lineno - 1, depth + 1)
            case _:
                yield Summand((node,), sign)

    def _product(self, left: ast.expr, right: ast.expr, sign: float, before: int, depth: int) -> Iterator[Summand]:
        numbers = [_number(self.frame, one) for one in (left, right)]
        if numbers.count(None) == 1:
            number = next(one for one in numbers if one is not None)
            inside = left if numbers[0] is None else right
            if number:
                yield from self._summands(inside, sign if number > 0 else -sign, before, depth)
        else:
            yield Summand(tuple(one for one in (left, right) if not isinstance(one, ast.Constant)), sign)


def text_of(frames: Iterable[FrameType]) -> Text | None:
    """The innermost function of the program; None: there is none, or its text is not known."""
    frame = next((one for one in frames if not is_of_library(one)), None)
    if frame is None:
        return None
    tree, code = parsed(frame.f_code.co_filename), frame.f_code
    if code.co_name == "<module>":
        return Text(frame, tree)
    functions = [one for one in nodes_of(tree, ast.FunctionDef) if one.name == code.co_name]
    around = [one for one in functions if one.lineno <= frame.f_lineno <= (one.end_lineno or 0)]
    return Text(frame, max(around, key=lambda one: one.lineno)) if around else None


def constants(text: Text, terms: list[Summand], trained: set[int]) -> Iterator[ConstantTerm]:
    """Yield the terms without a graph that are made of what trains; ``trained``: ``id``s of what the loss trains."""
    loss = text.loss()
    summed = set() if loss is None else _names(loss)
    for term in terms:
        others = summed | {name for one in terms if one is not term for each in one.factors for name in _names(each)}
        if all(_is_constant(text.frame, one) for one in term.factors):
            for factor in term.factors:
                if (cut := _cut(text, factor, trained, others)) is not None:
                    made, how = cut
                    yield ConstantTerm(line=text.line(made), name=ast.unparse(factor)[:60], made=how)
                    break


def divergences(text: Text, terms: list[Summand]) -> Iterator[OddDivergence]:
    """Yield the divergences in closed form whose sign in the loss is not that of a divergence."""
    for term in terms:
        for factor in term.factors:
            name, value = _divergence(text.frame, factor)
            if value is None or value.grad_fn is None:
                continue
            said = float(value.detach().float().mean())
            if said * term.sign < -FAR and _is_closed(value.grad_fn):
                line = text.line(next(iter(text.made(name, text.frame.f_lineno)), factor))
                yield OddDivergence(line=line, name=name, value=said, subtracted=term.sign < 0)


def _divergence(frame: FrameType, node: ast.expr) -> tuple[str, Tensor | None]:
    """The name of a divergence, be it averaged there, and what it stands for; None: it is none."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("mean", "sum"):
        node = node.func.value
    if not isinstance(node, ast.Name) or not _KL.search(node.id):
        return "", None
    value = known(frame, node)
    small = isinstance(value, Tensor) and 0 < value.numel() <= MOST_VALUES
    return node.id, value if small else None


# --- text ---


def own_nodes(body: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of functions inside it."""
    waiting = [*ast.iter_child_nodes(body)]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield node
            waiting += ast.iter_child_nodes(node)


def _assigns(node: ast.Assign | ast.AugAssign | ast.AnnAssign, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(name in (_names(one) if isinstance(one, ast.Name | ast.Tuple | ast.List) else ()) for one in targets)


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _chain(made: list[ast.Assign | ast.AugAssign | ast.AnnAssign], name: str) -> list[Any]:
    """The last assignments that build on each other, down to one that builds on nothing; nothing: there are others.

    What is assigned in several branches is not known.
    """
    whole = [at for at, one in enumerate(made) if not isinstance(one, ast.AugAssign) and name not in _of(one)]
    if len(whole) != 1 or whole[0] != len(made) - 1:
        return []
    is_alone = all(
        not isinstance(one, ast.Assign) or all(isinstance(at, ast.Name) for at in one.targets) for one in made
    )
    return made if is_alone else []


def _of(one: ast.Assign | ast.AugAssign | ast.AnnAssign) -> set[str]:
    return set() if one.value is None else _names(one.value)


def _is_sum(one: Any) -> bool:
    """Return whether an assignment adds something up."""
    value = one.value
    while isinstance(value, ast.UnaryOp):
        value = value.operand
    return isinstance(one, ast.AugAssign) or (isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add | ast.Sub))


def _number(frame: FrameType, node: ast.expr) -> float | None:
    """What a factor is, where it is a plain number; a sign may stand before it."""
    match node:
        case ast.UnaryOp(ast.USub(), inside):
            number = _number(frame, inside)
            return None if number is None else -number
        case ast.BinOp(left, ast.Mult() | ast.Div() | ast.Pow(), right):
            both = (_number(frame, left), _number(frame, right))
            signs = [1.0 if isinstance(node.op, ast.Pow) else one for one in both if one is not None]
            return None if None in both else (signs[0] or 0.0) * (1.0 if signs[1] >= 0 else -1.0)
        case ast.Constant(value):
            found = value
        case ast.Call(ast.Name("len"), _):
            found = 1
        case _:
            found = known(frame, node)
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


# --- values ---


def _is_constant(frame: FrameType, node: ast.expr) -> bool:
    """Return whether what an expression stands for has no graph, so far as its names tell."""
    if isinstance(node, ast.Name):
        value = known(frame, node)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number or (isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad)
    if isinstance(node, ast.Call) and _is_of_constants(frame, node):
        return True
    reached = {id(inside) for one in ast.walk(node) if _cuts(one) for inside in ast.walk(one)}
    outside = [one for one in ast.walk(node) if isinstance(one, ast.Name) and id(one) not in reached]
    values = [known(frame, one) for one in outside]
    values += [each for one in values if isinstance(one, list | tuple) for each in one[:MOST_HELD]]
    grows = any(isinstance(one, nn.Module) or (isinstance(one, Tensor) and one.requires_grad) for one in values)
    return bool(reached) and not grows and not any(isinstance(one, ast.Call) for one in ast.walk(node) if _loose(one))


def _is_of_constants(frame: FrameType, call: ast.Call) -> bool:
    """Return whether a program's function is given tensors without a graph alone, and names nothing that trains."""
    function = known(frame, call.func)
    if not isinstance(function, FunctionType) or function.__code__.co_freevars or call.keywords:
        return False
    values = [known(frame, one) for one in call.args]
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    grows = any(isinstance(one, nn.Module) or (isinstance(one, Tensor) and one.requires_grad) for one in named)
    return bool(values) and not grows and all(isinstance(one, Tensor) and not one.requires_grad for one in values)


def _loose(node: ast.AST) -> bool:
    """Return whether it calls a function of the program's, which may give anything."""
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in ("sum", "float", "len")
    )


def _cuts(node: ast.AST) -> bool:
    """Return whether an expression is what is left of another without its graph."""
    if isinstance(node, ast.Attribute):
        return node.attr == "data"
    return isinstance(node, ast.Call) and (_is_float(node) or getattr(node.func, "attr", "") in CUTS)


def _is_float(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id == "float"


def _cut(text: Text, node: ast.expr, trained: set[int], others: set[str]) -> tuple[ast.AST, str] | None:
    """What of the text of a factor takes the graph of what trains away, and where; None: nothing does."""
    made: list[Any] = text.made(node.id, text.frame.f_lineno) if isinstance(node, ast.Name) else [node]
    if isinstance(node, ast.Name) and not _chain(made, node.id):
        return None
    for one in made:
        inside = one.value if isinstance(one, ast.Assign | ast.AugAssign | ast.AnnAssign) else one
        if inside is None or (_names(inside) - _called(inside) - {getattr(node, "id", "")}) & others:
            continue
        for cut in (each for each in ast.walk(inside) if _cuts(each)):
            if _trains(text.frame, inside, cut, trained):
                return one, _how(cut)
        if _rests(text.body, one) and _trains(text.frame, inside, inside, trained):
            return one, "torch.no_grad()"
        if (gathered := _gathered(text, inside, trained)) is not None:
            return gathered, "a gather"
    return None


def _called(node: ast.AST) -> set[str]:
    """Names of functions that are called in an expression."""
    calls = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
    return {one.func.id for one in calls if isinstance(one.func, ast.Name)}


def _gathered(text: Text, inside: ast.AST, trained: set[int]) -> ast.AST | None:
    """What gathers outputs of all ranks without their graph, of which an expression is made; None: nothing does."""
    for name in sorted(_names(inside)):
        value = known(text.frame, ast.Name(name))
        for made in text.made(name, text.frame.f_lineno) if isinstance(value, Tensor) else ():
            calls = [one for one in ast.walk(made) if isinstance(one, ast.Call) and "gather" in (name_of(one) or "")]
            if not value.requires_grad and any(_trains(text.frame, made, one, trained) for one in calls):
                return made
    return None


def _how(cut: ast.AST) -> str:
    """As messages write it."""
    if isinstance(cut, ast.Call):
        return "float()" if _is_float(cut) else f".{name_of(cut)}()"
    return ".data"


def _trains(frame: FrameType, whole: ast.AST, cut: ast.AST, trained: set[int]) -> bool:
    """Return whether what is cut there is of weights, or of what they have made."""
    each = (one.target for one in ast.walk(whole) if isinstance(one, ast.comprehension))
    loops = {name for one in each for name in _names(one)}
    for one in ast.walk(cut):
        if isinstance(one, ast.Attribute) and one.attr in _WEIGHTS:
            owner = known(frame, one.value)
            return not isinstance(owner, nn.Module) or any(id(param) in trained for param in owner.parameters())
        if not isinstance(one, ast.Name):
            continue
        if one.id in loops:
            return any(isinstance(at, ast.Attribute) and at.attr in _WEIGHTS for at in ast.walk(whole))
        value = known(frame, one)
        if isinstance(value, Tensor) and (value.grad_fn is not None or id(value) in trained):
            return True
        if isinstance(value, nn.Module) and any(id(param) in trained for param in value.parameters()):
            return True
    return False


def _rests(body: ast.AST, node: ast.AST) -> bool:
    """Return whether a statement stands in a ``with torch.no_grad()`` of its function."""
    blocks = (one for one in own_nodes(body) if isinstance(one, ast.With))
    resting = (one for one in blocks if any("no_grad" in ast.unparse(item.context_expr) for item in one.items))
    return any(each is node for one in resting for each in ast.walk(one))


# --- graphs ---


def _is_closed(node: Any) -> bool:
    """Return whether a divergence is the closed form between Gaussians: the sum of an exponential and a square.

    What is estimated from samples has quotients, and may be below 0.
    """
    waiting, seen, atoms = [node], {node}, set()
    while waiting and len(seen) < CLOSED:
        one = waiting.pop()
        name = type(one).__name__.partition("Backward")[0]
        before = [each for each, _ in one.next_functions if each is not None]
        square = name == "Mul" and len(before) == 2 and before[0] is before[1]
        product = name in ("Mul", "Div") and len(before) > 1
        if name not in _SUMS or square or product:
            atoms.add("Pow" if square else "other" if product else name)
            continue
        waiting += [each for each in before if each not in seen]
        seen |= {*before}
    return {"Exp", "Pow"} <= atoms and "other" not in atoms
