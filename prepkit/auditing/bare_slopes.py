"""Derivatives that a loss is made of and that have no graph: what makes them is not trained by them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn

from prepkit.auditing.losses import leads_to_parameter
from prepkit.facts.terms import ConstantTerm
from prepkit.observe.prepared.around import frames_above, line_of_program, nodes_of, own_frames, parsed
from prepkit.observe.prepared.instead import around_calls

COMPARE = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
"""Losses of numbers, as derivatives are."""
ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Mean", "Sum")
"""Nodes that put a loss together of its terms."""
MOST = 4
"""Derivatives that are remembered."""
MADE = "torch.autograd.grad(...) without create_graph=True"
Body = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


@define(eq=False)
class BareSlopes:
    """Listens inside ``on()`` to ``torch.autograd.grad``.

    Told is a derivative of what trains by an input that the program adds to what it was taken of, or takes off it, as
    the residual of an equation does: an adversarial example moves the input by it.
    """

    found: dict[ConstantTerm, None] = field(factory=dict)
    _seen: set[tuple[str, int]] = field(factory=set)
    _taken: list[Tensor] = field(factory=list)
    """Such derivatives since the last backward."""
    _compared: list[str] = field(factory=list)
    """Lines of losses that have compared one of them since then."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        with ExitStack() as stack:
            stack.enter_context(around_calls(torch.autograd, "grad", self._takes))
            stack.enter_context(around_calls(torch.autograd, "backward", self._backward))
            for name in COMPARE:
                stack.enter_context(around_calls(nn.functional, name, self._compares))
            yield

    def _takes(self, plain: Any, outputs: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        bare = not (named.get("create_graph") or given[2:3] == (True,) or torch.compiler.is_compiling())
        if bare and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            by = [one for one in ([inputs] if isinstance(inputs, Tensor) else inputs) if isinstance(one, Tensor)]
            if by and all(one.is_leaf and not isinstance(one, nn.Parameter) for one in by):
                self._looks()
                found = plain(outputs, inputs, *given, **named)
                self._taken = [*self._taken, *(one.detach() for one in found if isinstance(one, Tensor))][-MOST:]
                return found
        return plain(outputs, inputs, *given, **named)

    def _compares(self, plain: Any, *given: Any, **named: Any) -> Any:
        """A loss compares a derivative that has no graph, or it with another sign, with what it is to be."""
        plainly = not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is None
        if self._taken and torch.is_grad_enabled() and plainly:
            known = dict(zip(("input", "target"), given, strict=False)) | named
            pair = [one for one in (known.get("input"), known.get("target")) if isinstance(one, Tensor)]
            if len(pair) == 2 and not any(one.requires_grad for one in pair) and any(map(self._is_taken, pair)):
                self._compared.append(line_of_program(frames_above(__file__)))
        return plain(*given, **named)

    def _is_taken(self, one: Tensor) -> bool:
        kind = (one.shape, one.dtype, one.device)
        alike = (each for each in self._taken if (each.shape, each.dtype, each.device) == kind)
        return any(torch.equal(one, each) or torch.equal(one, -each) for each in alike)

    def _backward(self, plain: Any, losses: Any, *given: Any, **named: Any) -> Any:
        """Told is what was compared where the loss that goes backward adds something without a graph."""
        nested = torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1
        loss = losses[0] if isinstance(losses, tuple | list) and losses else losses
        if not nested:
            lines = self._compared if _adds_a_constant(getattr(loss, "grad_fn", None)) else []
            self.found |= {ConstantTerm(line=line, name="A loss of a derivative", made=MADE): None for line in lines}
            self._taken, self._compared = [], []
        return plain(losses, *given, **named)

    def _looks(self) -> None:
        for frame in own_frames():
            place = (frame.f_code.co_filename, frame.f_lineno)
            scope, statement = _statement(frame)
            if isinstance(statement, ast.Return):
                continue  # of a helper, whose result the function above has
            if place not in self._seen and isinstance(statement, ast.Assign):
                self._seen.add(place)
                given = [(name, frame.f_locals.get(name)) for name in _names(statement.value)]
                taken = {name for name, one in given if isinstance(one, Tensor) and leads_to_parameter(one)}
                results = {name for target in statement.targets for name in _names(target)}
                if name := _joined(scope, statement, results, taken):
                    line = f"{Path(place[0]).name}:{place[1]}"
                    self.found[ConstantTerm(line=line, name=name, made=MADE)] = None
            return


def _adds_a_constant(node: Any, depth: int = 8) -> bool:
    """Return whether a sum at the end of a graph has a part that has none."""
    if node is None or not depth or not node.name().startswith(ARITHMETIC):
        return False
    inside = [one for one, _ in node.next_functions]
    adds = node.name().startswith(("Add", "Sub")) and None in inside and len(inside) > 1
    return adds or any(_adds_a_constant(one, depth - 1) for one in inside)


def _statement(frame: FrameType) -> tuple[Body, ast.stmt | None]:
    """The function in which a frame stands, and the statement there."""
    tree, line = parsed(frame.f_code.co_filename), frame.f_lineno
    homes = [one for one in nodes_of(tree, ast.FunctionDef, ast.AsyncFunctionDef) if _has(one, line)]
    scope: Any = max(homes, key=lambda one: one.lineno, default=tree)
    every = (one for one in nodes_of(tree, ast.Assign, ast.Return) if _has(one, line))
    return scope, max(every, key=lambda one: one.lineno, default=None)


def _has(one: ast.stmt, line: int) -> bool:
    return one.lineno <= line <= (one.end_lineno or one.lineno)


def _joined(scope: Body, statement: ast.stmt, results: set[str], taken: set[str]) -> str:
    """The name of a result that is added to what it was taken of, or is taken off it, further on; empty: none is."""
    every = (one for one in ast.walk(scope) if isinstance(one, ast.stmt) and one is not statement)
    after = [one for one in every if one.lineno >= statement.lineno]
    derived, others = _derived(after, results), _derived(after, taken - results)
    for one in after:
        for sum_ in (node for node in ast.walk(one) if isinstance(node, ast.BinOp)):
            left, right = {*_names(sum_.left)}, {*_names(sum_.right)}
            for mine, its in ((left, right), (right, left)):
                if isinstance(sum_.op, ast.Add | ast.Sub) and mine & derived and not mine & others and its & others:
                    return min(mine & derived)
    return ""


def _derived(after: Iterable[ast.stmt], names: set[str]) -> set[str]:
    """These names, and those that are bound to what is made of the same alone."""
    found = set(names)
    bound = (one for one in after if isinstance(one, ast.Assign) and not isinstance(one.value, ast.Call | ast.BinOp))
    for one in bound:
        if not found.isdisjoint(_names(one.value)):
            found |= {name for target in one.targets if isinstance(target, ast.Name) for name in _names(target)}
    return found


def _names(node: ast.AST) -> Iterator[str]:
    yield from (one.id for one in ast.walk(node) if isinstance(one, ast.Name))
