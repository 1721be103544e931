"""What is drawn from distributions that train, and what losses make of it: ratios of policies, and advantages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.distributions import Distribution
from torch.optim.optimizer import register_optimizer_step_pre_hook

from prepkit.auditing.shapes import SHAPES
from prepkit.auditing.terms import ASKS, graph, name_of, taken_from
from prepkit.observe.prepared.around import called_by_program, frames_above, line_of_program
from prepkit.observe.prepared.instead import around_calls

DRAWS = ("multinomial", "normal", "bernoulli")
"""Functions of torch by which distributions draw; by the first of them programs draw actions and tokens too."""
FEWEST = 8
"""Samples of a ratio."""
TIMES = 3
"""Losses of one line whose ratio is 1, behind a step since the last draw."""
MARK, DRAWN = "prepkit.log-probability", "prepkit.drawn"
"""Names of marks on what a log-probability has computed, and on parameters of what was drawn from."""
MOST_LINES = 8
"""Lines that go backward whose losses are looked into."""
MOST_DRAWS = 16
"""That are remembered between two backwards."""
MOST_HOPS = 12
"""Nodes between a product and what its factors are."""
ROWS, COLUMNS = 8, 64
"""Numbers of a draw by which it is known again."""
WEIGHED = {"Addmm": "_saved_mat1", "Mm": "_saved_self", "Bmm": "_saved_self", "Convolution": "_saved_input"}
"""What computes by a weight, and keeps what it is given."""


@frozen(eq=False)
class _Drawn:
    """What a program has drawn without a graph, where what it was drawn from has one."""

    line: str
    kind: str
    """Class of the distribution."""
    at: int
    """Which draw of all it is."""
    owners: tuple[int, ...]
    """``id``s of the distribution, and of those in it."""
    rows: int
    some: Tensor


@define(eq=False)
class Ratios:
    """Listens inside ``on()``."""

    _drawn: list[_Drawn] = field(factory=list)
    """Since the last backward."""
    _draw: int = 0
    _cut: dict[tuple[str, str], None] = field(factory=dict)
    _advantages: dict[str, None] = field(factory=dict)
    _lines: Counter[str] = field(factory=Counter)

    _stepped: int | None = None
    """Steps since something was drawn; None: nothing was."""
    _idle: Counter[str] = field(factory=Counter)
    """By the line that goes backward, losses with a ratio of 1 though the policy has stepped since it drew."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._steps).remove)
            stack.enter_context(around_calls(torch.autograd, "backward", self._backward))
            for name in DRAWS:
                stack.enter_context(around_calls(torch, name, partial(self._draws, name)))
            for kind in _kinds(Distribution):
                for name, around in (("sample", self._samples), ("log_prob", self._says)):
                    if name in vars(kind):
                        stack.enter_context(around_calls(kind, name, around))
            yield

    def told(self) -> dict[str, Any]:
        """What was heard so far, as fields of ``WindowFacts``."""
        idle = tuple(line for line, times in self._idle.items() if times >= TIMES)
        return {"ratios": idle, "advantages": tuple(self._advantages), "cut_draws": tuple(self._cut)}

    def _draws(self, name: str, plain: Any, *given: Any, **named: Any) -> Any:
        caller = next(frames_above(__file__)).f_globals.get("__name__", "")
        if name == "multinomial" or caller.startswith("torch.distributions"):
            self._stepped = 0
        return plain(*given, **named)

    def _steps(self, *_: Any) -> None:
        if self._stepped is not None:
            self._stepped += 1

    def _backward(self, plain: Any, tensors: Any, *given: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1 and not ASKS.now:
            loss = tensors[0] if isinstance(tensors, tuple | list) and len(tensors) == 1 else tensors
            line = line_of_program(frames_above(__file__))
            if type(loss) is Tensor and loss.grad_fn is not None and (self._stepped or self._is_new(line)):
                self._looks(graph(loss.grad_fn), line, new=not named.get("create_graph"))
            self._drawn = []
        return plain(tensors, *given, **named)

    def _is_new(self, line: str) -> bool:
        return bool(line) and self._lines[line] < TIMES and len(self._lines) <= MOST_LINES

    def _looks(self, every: list[Any], line: str, *, new: bool) -> None:
        if self._stepped and any(map(_is_one, every)):
            self._idle[line] += 1
        if new and self._is_new(line):
            self._lines[line] += 1
            if any(name_of(one) == "Mul" and _is_led(one) for one in every):
                self._advantages[line] = None
            marks = {mark for one in every for mark in one.metadata.get(DRAWN, ())} if self._drawn else set()
            for drawn in (one for one in self._drawn if one.at in marks):
                if any(_is_weighed(one, drawn) for one in every):
                    self._cut[drawn.line, drawn.kind] = None

    def _samples(self, plain: Any, distribution: Any, *given: Any, **named: Any) -> Any:
        drawn = plain(distribution, *given, **named)
        if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
            return drawn
        frames = list(frames_above(__file__))
        if torch.is_grad_enabled() and distribution.has_rsample and called_by_program(frames):
            owners = [*_inside(distribution)]
            held = [one for owner in owners for one in vars(owner).values() if isinstance(one, Tensor)]
            made: list[Any] = [one.grad_fn for one in held if one.grad_fn is not None]
            if made and type(drawn) is Tensor and drawn.dim() and drawn.numel() and not drawn.requires_grad:
                self._draw += 1
                for node in made:
                    node.metadata[DRAWN] = (*node.metadata.get(DRAWN, ()), self._draw)[-MOST_DRAWS:]
                flat, kind = drawn.reshape(-1, drawn.shape[-1]), type(distribution).__name__
                ids, some = tuple(map(id, owners)), flat[:ROWS, :COLUMNS].clone()
                draw = _Drawn(line_of_program(frames), kind, self._draw, ids, len(flat), some)
                self._drawn = [*self._drawn, draw][-MOST_DRAWS:]
        return drawn

    def _says(self, plain: Any, distribution: Any, value: Any, *given: Any, **named: Any) -> Any:
        said = plain(distribution, value, *given, **named)
        inside = torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None
        if not inside and type(said) is Tensor and said.grad_fn is not None:
            marks: Any = said.grad_fn.metadata
            marks[MARK] = True
        if not inside and self._drawn:
            self._drawn = [one for one in self._drawn if not (id(distribution) in one.owners or _has(value, one))]
        return said


def _kinds(kind: type) -> Iterator[type]:
    """A class and all that are derived from it, each once."""
    derived: list[type] = kind.__subclasses__()
    yield from dict.fromkeys((kind, *(each for one in derived for each in _kinds(one))))


def _inside(distribution: Any) -> Iterator[Any]:
    """A distribution, and that which it is made of."""
    while isinstance(distribution, Distribution):
        yield distribution
        distribution = vars(distribution).get("base_dist")


def _has(value: Any, drawn: _Drawn) -> bool:
    """Return whether a tensor holds what was drawn, be it beside other columns."""
    if not isinstance(value, Tensor) or not value.dim() or not value.numel() or value.is_meta:
        return False
    rows, columns = value.numel() // value.shape[-1], drawn.some.shape[1]
    if rows != drawn.rows or value.shape[-1] < columns or value.device != drawn.some.device:
        return False
    with torch.no_grad():
        flat = value.detach().reshape(rows, -1)[: len(drawn.some)]
        parts = (flat[:, :columns], flat[:, -columns:])
        return any(one.dtype == drawn.some.dtype and torch.equal(one, drawn.some) for one in parts)


def _is_weighed(node: Any, drawn: _Drawn) -> bool:
    """Return whether a weight that trains is applied to what was drawn."""
    kept = WEIGHED.get(name_of(node))
    leaves = (leaf for one in taken_from(node) for leaf in (one, *(each for each, _ in one.next_functions)))
    if kept is None or not any(hasattr(one, "variable") for one in leaves):
        return False
    try:
        return _has(getattr(node, kept, None), drawn)
    except RuntimeError:  # freed, or written over since
        return False


def _is_led(node: Any) -> bool:
    """Return whether a product is one of a log-probability, or a ratio, and a constant less what trains."""
    factors = [one for one, _ in node.next_functions]
    if len(factors) != 2 or None in factors:
        return False
    pairs = (factors, factors[::-1])
    return any(_is_log_probability(one) and _is_advantage(other) for one, other in pairs)


def _is_log_probability(node: Any) -> bool:
    """Return whether it is one of what was drawn, or the exponential of a difference from another."""
    for _ in range(MOST_HOPS):
        if node.metadata.get(MARK) or _is_picked(node):
            return True
        name, before = name_of(node), taken_from(node)
        joins = name in ("Stack", "Cat", "Sum", "Neg", "Exp", *SHAPES) or (name in ("Add", "Sub") and len(before) == 1)
        if not joins or not before:
            return False
        node = before[0]
    return False


def _is_picked(node: Any) -> bool:
    """Return whether it takes one of each sample's log-probabilities."""
    return name_of(node) in ("Gather", "Index") and any(name_of(one) == "LogSoftmax" for one in taken_from(node))


def _is_advantage(node: Any) -> bool:
    """Return whether it is, before it was normalised, a tensor without a graph less an output of parameters."""
    for _ in range(MOST_HOPS):
        name, before = name_of(node), taken_from(node)
        if name == "Sub" and node.next_functions[0][0] is None and before:
            return not _is_log_probability(before[0]) and _leads_to_weights(before)
        through = name in ("Div", "Mul", "Neg", "Stack", "Sub", *SHAPES)
        if not through or not before or node.next_functions[0][0] is None:
            return False
        node = before[0]
    return False


def _leads_to_weights(nodes: Iterable[Any]) -> bool:
    return any(isinstance(getattr(one, "variable", None), torch.nn.Parameter) for each in nodes for one in graph(each))


def _is_one(node: Any) -> bool:
    """Return whether it is the exponential of a difference from what does not train, and 1 for every sample."""
    if name_of(node) != "Exp":
        return False
    before = node.next_functions[0][0]
    if before is None or name_of(before) != "Sub" or sum(one is not None for one, _ in before.next_functions) != 1:
        return False
    ratio = node._saved_result
    return ratio.numel() >= FEWEST and bool((ratio == 1).all())
