"""Which backwards have gone into the gradients that an optimizer is about to step."""

from __future__ import annotations

import ast
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from heapq import nsmallest
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from prepkit.auditing.course import SAMPLED, memory_of
from prepkit.auditing.terms import graph
from prepkit.objects.alive import alive
from prepkit.objects.local_part import local
from prepkit.observe.prepared.around import (
    Line,
    frames_above,
    line_of_program,
    lines_of_program,
    loops_have,
    nodes_of,
    parsed,
    reads_gradients,
)
from prepkit.observe.prepared.instead import around_calls

AGAIN = 3
"""So many optimizers of one line say that it makes one for each step."""
_LBFGS = str(Path(torch.optim.__file__).parent / "lbfgs")
"""The file of the optimizer that calls its closure several times for one step."""
MOST_STEPS = 2
"""Of an optimizer that is made for a step, or for one and another; those of stages take more."""
MOST = 512
"""Backwards that are followed."""
MOST_ASKED = 64
"""Those of which it is asked what gets a gradient."""
NEAR = 4
"""Steps from what goes backward to what was scaled."""


@frozen(eq=False)
class _Went:
    """One backward."""

    line: str
    stands: tuple[Line, ...]
    scaled: bool
    """Whether its loss was scaled, or a part of it."""
    asks: bool
    """Whether it gives a gradient to what is computed with and no parameter, as a picture that is attacked."""


@frozen(eq=False)
class _Turn:
    """One step: of which optimizer, behind how many backwards, and those that it stepped."""

    optimizer: weakref.ref[Any]
    at: int
    parts: frozenset[int]
    line: str
    empty: bool
    """Whether nothing that it holds has a gradient."""
    inside: frozenset[int] = frozenset()
    """Backwards of the closure that it was given, which are made when it has begun."""


@define(eq=False)
class _Entry:
    """What has gone into one gradient since it was cleared."""

    param: Tensor
    memory: Any = None
    parts: list[int] = field(factory=list)
    by_hand: bool = False
    """Whether the program has put another tensor there since the last backward."""

    def looks(self) -> list[int]:
        """Forgets what somebody has cleared or put there, and returns it."""
        now, before, gone = memory_of(self.param), self.memory, list[int]()
        if now != before:
            elsewhere = now is None or before is None or now[:2] != before[:2]
            zero = self.param.grad is None or not local(self.param.grad).any()
            self.by_hand = self.by_hand or (elsewhere and not zero)
            gone, self.parts = (self.parts, []) if elsewhere or zero else ([], self.parts)
        self.memory = now
        return gone


@define(eq=False)
class Ledger:
    """Listens inside ``on()``; a few small parameters of each optimizer are followed."""

    _went: list[_Went] = field(factory=list)
    _turns: list[_Turn] = field(factory=list)
    _entries: weakref.WeakKeyDictionary[Any, list[_Entry]] = field(factory=weakref.WeakKeyDictionary)
    _known: weakref.WeakSet[Any] = field(factory=weakref.WeakSet)
    """Optimizers."""
    _made_at: weakref.WeakKeyDictionary[Any, str] = field(factory=weakref.WeakKeyDictionary)
    """The line that has made each."""
    _begun: defaultdict[tuple[str, str, frozenset[int]], list[int]] = field(factory=partial(defaultdict, list))
    """Steps of each optimizer of one line over the same parameters, by line, class and parameters."""
    _gone: Counter[int] = field(factory=Counter)
    """Backwards whose gradients were cleared somewhere."""
    _suspected: list[tuple[Any, int, tuple[str, str]]] = field(factory=list)
    """Stale gradients of an optimizer whose last backward has gone into those of others too, which may step them."""
    led: bool = True
    """Whether something has gone backward between the step before and the one that begins."""
    stale: tuple[tuple[str, str], ...] = ()
    """As in ``WindowFacts``, of the step that begins."""
    wasted: tuple[tuple[str, int], ...] = ()
    """Likewise."""
    unled: tuple[tuple[str, str], ...] = ()
    """Likewise."""
    anew: tuple[str, str] = ("", "")
    """Likewise."""
    half_scaled: tuple[str, str] = ("", "")
    """Likewise."""
    asked: tuple[str, int] = ("", 0)
    """Likewise."""
    _scaled: list[Any] = field(factory=list)
    """Nodes of graphs that scaled losses come from."""
    _divided: weakref.WeakKeyDictionary[Any, int] = field(factory=weakref.WeakKeyDictionary)
    """By optimizer how many had gone backward when its gradients were divided by the scale."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        handles = register_optimizer_step_pre_hook(self._steps), register_optimizer_step_post_hook(self._stepped)
        try:
            with (
                around_calls(torch.autograd, "backward", self._backward),
                around_calls(torch.optim.Optimizer, "__init__", self._made),
            ):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def told(self) -> dict[str, Any]:
        """What is wrong with the step that begins, as fields of ``WindowFacts``."""
        told: dict[str, Any] = {"stale": self.stale, "wasted": self.wasted, "unled": self.unled}
        return told | {"anew": self.anew, "half_scaled": self.half_scaled, "asked": self.asked}

    def scales(self, losses: Any, *, enabled: bool) -> Any:
        """Hears of losses that were scaled, and gives them back."""
        nodes = [one.grad_fn for one in tree_leaves(losses) if isinstance(one, Tensor)] if enabled else []
        self._scaled = (self._scaled + nodes)[-MOST:]
        return losses

    def divides(self, optimizer: Any) -> None:
        """Gradients of this optimizer are divided by the scale."""
        self._divided[optimizer] = len(self._went)

    def _made(self, plain: Any, optimizer: Any, *given: Any, **named: Any) -> None:
        plain(optimizer, *given, **named)
        self._known.add(optimizer)
        self._made_at[optimizer] = line_of_program(frames_above(__file__))

    @torch.no_grad()
    def _steps(self, optimizer: Any, *_: Any) -> None:
        self.stale, self.wasted, self.unled, self.anew, self.half_scaled = (), (), (), ("", ""), ("", "")
        self.asked = ("", 0)
        if len(self._went) >= MOST:
            return
        self._looks()
        entries = self._entries.get(optimizer, [])
        parts = sorted({part for one in entries for part in one.parts})
        self.anew, self.half_scaled = self._made_again(optimizer), self._scaled_in_part(optimizer, entries)
        self.asked = self._asked(parts)
        found = (*self._of_other_turns(optimizer, parts), *self._confirmed(optimizer), *self._from_before(parts))
        self.stale = tuple(dict.fromkeys(found))
        line = line_of_program(frames_above(__file__))
        self.led = not self._turns or self._turns[-1].at < len(self._went)
        empty = all(one.grad is None for group in optimizer.param_groups for one in group["params"])
        self._turns.append(_Turn(weakref.ref(optimizer), len(self._went), frozenset(parts), line, empty))
        self.wasted, self.unled = tuple(self._in_vain(entries)), tuple(self._unled())

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        """Takes what went backward inside the step."""
        for at, turn in reversed([*enumerate(self._turns)][-MOST_STEPS:]):
            if turn.optimizer() is optimizer and turn.at < len(self._went):
                parts = {part for one in self._entries.get(optimizer, ()) for part in one.parts if part >= turn.at}
                self._turns[at] = evolve(turn, inside=frozenset(parts), empty=turn.empty and not parts)
                return

    def _looks(self) -> None:
        """Takes down what was cleared."""
        for one in self._followed():
            self._gone.update(one.looks())

    def _made_again(self, optimizer: Any) -> tuple[str, str]:
        """Class and line of an optimizer that has state, and begins to step the same as others of its line.

        The last two of which have hardly stepped: those of stages last longer.
        """
        begun = any(turn.optimizer() is optimizer for turn in self._turns)
        key = "", type(optimizer).__name__, frozenset(id(one.param) for one in self._entries.get(optimizer, ()))
        if not (line := self._made_at.get(optimizer, "")) or not _remembers(optimizer) or not key[2]:
            return "", ""
        steps = self._begun[(line, *key[1:])]
        if begun and steps:
            steps[-1] += 1
            return "", ""
        steps.append(1)
        anew = len(steps) >= AGAIN and max(steps[-AGAIN:-1]) <= MOST_STEPS
        return (key[1], line) if anew else ("", "")

    def _of_other_turns(self, optimizer: Any, parts: list[int]) -> Iterator[tuple[str, str]]:
        """Those of losses that another optimizer has stepped, before the last loss, which is of this one alone."""
        last = parts[-1] if parts else 0
        mine = {id(one.param) for one in self._entries.get(optimizer, ())}
        others = [one for each in self._entries.values() for one in each if id(one.param) not in mine]
        shared = any(last in one.parts for one in others)
        for part in parts[:-1]:
            for turn in self._turns:
                taken = part in turn.parts and turn.at <= last and turn.optimizer() is not optimizer
                later = {self._went[one].line for one in parts if one >= turn.at}
                if taken and self._went[part].line not in later:
                    pair = self._went[part].line, turn.line
                    if not shared:
                        yield pair
                    else:
                        self._suspected.append((weakref.ref(optimizer), last, pair))

    def _scaled_in_part(self, optimizer: Any, entries: list[_Entry]) -> tuple[str, str]:
        """Lines of backwards into one gradient, before it was divided: of a scaled loss, and of one that is not."""
        until = self._divided.pop(optimizer, len(self._went))
        for one in entries:
            lines = {self._went[part].scaled: self._went[part].line for part in one.parts if part < until}
            if len(lines) > 1:
                return lines[True], lines[False]
        return "", ""

    def _asked(self, parts: list[int]) -> tuple[str, int]:
        """The line of several backwards for the sake of an input, before one of the weights alone, and how many."""
        if not parts or self._went[parts[-1]].asks:
            return "", 0
        lines = Counter(self._went[part].line for part in parts if self._went[part].asks)
        line, many = max(lines.items(), key=lambda one: one[1], default=("", 0))
        return (line, many) if many > 1 else ("", 0)

    def _confirmed(self, optimizer: Any) -> Iterator[tuple[str, str]]:
        """What was suspected of this optimizer's last step: nobody else has stepped its last backward since."""
        mine = [one for one in self._suspected if one[0]() is optimizer]
        self._suspected = [one for one in self._suspected if one[0]() is not optimizer]
        for _, last, pair in mine:
            if not any(last in turn.parts and turn.optimizer() is not optimizer for turn in self._turns):
                yield pair

    def _from_before(self, parts: list[int]) -> Iterator[tuple[str, str]]:
        """Those from outside of every loop around the step, in some of which the last one lies."""
        now = lines_of_program(frames_above(__file__))
        if parts and loops_have(self._went[parts[-1]].stands, now):
            outside = (self._went[part] for part in parts if not loops_have(self._went[part].stands, now))
            yield from ((one.line, "") for one in outside)

    def _in_vain(self, entries: list[_Entry]) -> Iterator[tuple[str, int]]:
        """Lines of this loop whose gradients were cleared before anybody had stepped them, and how often.

        Of none where the program reads gradients, or writes into them or into weights, itself: it uses them so.
        """
        stepped = {part for turn in self._turns for part in turn.parts | turn.inside}
        left = {part for each in self._entries.values() for one in each for part in one.parts}
        lines = Counter(self._went[part].line for part in self._gone if part not in stepped | left)
        now = lines_of_program(frames_above(__file__))
        again = [line for line, many in lines.items() if many > 1]
        nothing = any(not turn.parts for turn in self._turns)  # which is told of who steps so
        if not again or nothing or any(one.by_hand for one in entries) or reads_gradients():
            return
        for line in again:
            where = next(one for one in reversed(self._went) if one.line == line)
            if loops_have(where.stands, now):
                yield line, lines[line]

    def _unled(self) -> Iterator[tuple[str, str]]:
        """Lines of a backward that nobody has stepped, and of the step right behind it, which held no gradient."""
        stepped = {part for turn in self._turns for part in turn.parts | turn.inside}
        lost = {part for part in self._gone if part not in stepped}
        behind = ((turn, turn.at - 1) for before, turn in pairwise(self._turns) if before.at < turn.at)
        lines = Counter((self._went[last].line, turn.line) for turn, last in behind if turn.empty and last in lost)
        yield from (pair for pair, many in lines.items() if many > 1 and not reads_gradients())

    def _backward(self, plain: Any, *given: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1 or len(self._went) >= MOST:
            return plain(*given, **named)
        with torch.no_grad():
            self._looks()
        losses = given[0] if given else named["tensors"]
        scaled, asks_inputs = self._is_scaled(losses), len(self._went) < MOST_ASKED and _asks(losses)
        result = plain(*given, **named)
        frames = list(frames_above(__file__))
        closes = any(one.f_code.co_filename.startswith(_LBFGS) for one in frames)  # of a step that asks again and again
        stands = () if closes else tuple(lines_of_program(frames))
        asks = asks_inputs and _reads_gradient(stands)
        self._went.append(_Went(line_of_program(frames), stands, scaled, asks))
        for one in self._followed():
            if (now := memory_of(one.param)) != one.memory:
                one.memory, one.by_hand = now, False
                one.parts.append(len(self._went) - 1)
        return result

    def _is_scaled(self, losses: Any) -> bool:
        """Whether one of these is a scaled loss, or is computed from one in a few steps."""
        nodes = [one.grad_fn for one in tree_leaves(losses) if isinstance(one, Tensor)]
        for _ in range(NEAR if self._scaled else 0):
            if any(node is one for node in nodes for one in self._scaled if node is not None):
                return True
            nodes = [after for node in nodes if node is not None for after, _ in node.next_functions]
        return False

    def _followed(self) -> Iterator[_Entry]:
        """What is followed, of all optimizers that there are."""
        self._known = self._known if self._went else weakref.WeakSet(alive(torch.optim.Optimizer))
        for one in self._known:
            if one not in self._entries:
                held = {id(param): param for group in one.param_groups for param in group["params"]}
                trained = [param for param in held.values() if param.requires_grad]
                self._entries[one] = [
                    _Entry(param, memory_of(param)) for param in nsmallest(SAMPLED, trained, key=torch.numel)
                ]
            yield from self._entries[one]


def _asks(losses: Any) -> bool:
    nodes = [one.grad_fn for one in tree_leaves(losses) if isinstance(one, Tensor) and one.grad_fn is not None]
    leaves = (getattr(one, "variable", None) for node in nodes for one in graph(node))
    return any(isinstance(one, Tensor) and not isinstance(one, nn.Parameter) for one in leaves)


def _reads_gradient(stands: Sequence[Line]) -> bool:
    """Return whether the function that goes backward names a ``.grad``, and not ``autograd.grad(...)`` alone."""
    code = stands[0][0] if stands else None
    if code is None:
        return False
    end = max((line for _, _, line in code.co_lines() if line), default=0)
    tree = parsed(code.co_filename)
    called = {id(one.func) for one in nodes_of(tree, ast.Call)}
    named = (one.lineno for one in nodes_of(tree, ast.Attribute) if one.attr == "grad" and id(one) not in called)
    return any(code.co_firstlineno <= line <= end for line in named)


def _remembers(optimizer: Any) -> bool:
    """Return whether it keeps something from step to step, as all do but SGD without momentum."""
    return type(optimizer).__name__ != "SGD" or any(group.get("momentum") for group in optimizer.param_groups)
