"""Functions of a program that have given back a loss, as they stood then: what goes backward is often made in one.

And what methods of modules have given back beside, of which there is one number, or one for each sample.
"""

from __future__ import annotations

import ast
import sys
import weakref
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from prepkit.auditing.term_texts import Text, own_nodes, text_of
from prepkit.observe.prepared.around import Line, is_foreign, lines_of_program, nodes_of, parsed

MOST_HELD = 16
"""Functions that are kept until something goes backward."""
MOST_PARTS = 16
"""Of what a function gives back."""
MOST_TURNS = 8
"""Times from a call of a module to a backward in which it listens: Python then calls it for each function."""
MOST_CALLS = 64
"""Calls of modules behind which it stops, where nothing goes backward, as while a program only infers."""
MOST_TERMS = 256
"""Of modules that are kept until something goes backward."""
MARK = "prepkit.given-back"
_PAUSES = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR


@frozen(eq=False)
class GivesBack(Text):
    """A function of a program that has given back a loss."""

    said: ast.expr
    """The expression of the loss."""
    value: Tensor

    def loss(self) -> ast.expr | None:
        """What was given back."""
        return self.said


class _Mark:
    """Lies at a node of a graph, and lives as long as the graph of something does that is made of it."""


@frozen(eq=False)
class TermOf:
    """What a method of a module has given back; nothing of it is kept alive."""

    module: weakref.ref[nn.Module]
    stands: Line
    """Where the program has called it."""
    shape: tuple[int, ...]
    mark: weakref.ref[Any]

    @property
    def line(self) -> str:
        """As messages write it."""
        code, line = self.stands
        return f"{Path(code.co_filename).name}:{line}"

    def names(self) -> str:
        """What the statement there binds, in which it is called once; empty: it binds nothing, or a list of several."""
        code, line = self.stands
        bound = nodes_of(parsed(code.co_filename), ast.Assign)
        here = [one for one in bound if one.lineno <= line <= (one.end_lineno or 0)]
        several = any(isinstance(part, ast.comprehension) for one in here for part in ast.walk(one))
        return "" if several or len(here) != 1 else ", ".join(ast.unparse(one).strip("()") for one in here[0].targets)

    def is_at(self, node: Any) -> bool:
        """Return whether this node has computed it."""
        mark = self.mark()
        return mark is not None and node.metadata.get(MARK) is mark


@define(eq=False)
class GivenBack:
    """Listens inside ``on()``, from a call of a module up to what goes backward behind it, in this thread."""

    _held: deque[tuple[FrameType, Any, Tensor]] = field(factory=lambda: deque(maxlen=MOST_HELD))
    """Frames, the place of a loss in what they have given back (None: it is all of it), and the loss."""
    _terms: dict[tuple[type, CodeType, Any], list[TermOf]] = field(factory=dict)
    """By the class of a module, its method and the place in what that gives: what modules gave, each the last time."""
    _others: set[CodeType] = field(factory=set)
    """Code of libraries, and what gives back several times."""
    _turns: int = 0
    _calls: int = 0
    """Since it listens."""
    _listens: bool = False

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it may listen."""
        try:
            yield
        finally:
            self._turns = MOST_TURNS
            self.ends()

    def enters(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module is called: it listens, unless somebody else does."""
        del module, args, kwargs
        self._calls += 1
        if self._listens and self._calls > MOST_CALLS:
            self.ends()
        free = not self._listens and self._turns < MOST_TURNS and sys.getprofile() is None
        if free and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._listens, self._calls = True, 0
            self._turns += 1
            sys.setprofile(self._hears)

    def ends(self) -> None:
        """Something has gone backward, and nothing is kept."""
        if self._listens and sys.getprofile() == self._hears:
            sys.setprofile(None)
        self._listens = False
        self._held.clear()
        self._terms.clear()

    def texts(self, nodes: Collection[Any]) -> Iterator[GivesBack]:
        """The functions that have given back one of these nodes, where their text says by what expression."""
        for frame, place, value in [*self._held]:
            text = text_of([frame]) if value.grad_fn in nodes else None
            if text is not None and (said := _said(text, place)) is not None:
                yield GivesBack(frame=frame, body=text.body, said=said, value=value)

    def terms(self) -> Iterator[tuple[str, list[TermOf]]]:
        """The name of each method that several modules of a class have, and what these gave by it, in order of calls.

        Lets go of all that keeps any of it alive.
        """
        self._held.clear()
        yield from ((code.co_name, each) for (_, code, _), each in self._terms.items() if len(each) > 1)

    def _hears(self, frame: FrameType, event: str, given: Any) -> None:
        code = frame.f_code
        if event != "return" or given is None or code in self._others:
            return
        if torch._C._functorch.maybe_current_level() is not None:
            return  # what a transform of torch.func computes with means nothing outside of it
        if is_foreign(code.co_filename) or code.co_flags & _PAUSES:
            self._others.add(code)
            return
        parts = _parts(given)
        self._held.extend((frame, place, one) for place, one in parts if _is_loss(one))
        terms = [(place, one) for place, one in parts if _is_term(one)]
        if terms and isinstance(owner := frame.f_locals.get("self"), nn.Module):
            for place, one in terms:
                self._takes_down(owner, frame, place, one)

    def _takes_down(self, owner: nn.Module, frame: FrameType, place: Any, value: Tensor) -> None:
        known = self._terms.setdefault((type(owner), frame.f_code, place), [])
        if any(one.module() is owner for one in known):  # another pass begins
            known.clear()
        if len(known) < MOST_TERMS:
            node: Any = value.grad_fn
            mark = node.metadata.setdefault(MARK, _Mark())
            stands = next(iter(lines_of_program(_callers(frame))), (frame.f_code, 0))
            known.append(TermOf(weakref.ref(owner), stands, tuple(value.shape), weakref.ref(mark)))


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None and (frame := frame.f_back) is not None:
        yield frame


def _parts(given: Any) -> list[tuple[Any, Any]]:
    if isinstance(given, dict):  # by its own method: a table of the program's may compute what it is asked for
        return [*dict.items(given)][:MOST_PARTS]
    return [*enumerate(given)][:MOST_PARTS] if type(given) in (tuple, list) else [(None, given)]


def _is_loss(value: Any) -> bool:
    return type(value) is Tensor and value.numel() == 1 and value.grad_fn is not None


def _is_term(value: Any) -> bool:
    """Return whether it is one number, or one for each of some samples."""
    each = type(value) is Tensor and value.grad_fn is not None and value.dim() < 3
    return each and value.numel() == (len(value) if value.dim() else 1)


def _said(text: Text, place: Any) -> ast.expr | None:
    """The expression in the return that has just run; None: the text does not tell."""
    line = text.frame.f_lineno
    returns = (one for one in own_nodes(text.body) if isinstance(one, ast.Return))
    value = next((one.value for one in returns if one.lineno <= line <= (one.end_lineno or 0)), None)
    if place is None:
        return value
    match value:
        case ast.Tuple(parts) | ast.List(parts) if isinstance(place, int) and place < len(parts):
            starred = any(isinstance(one, ast.Starred) for one in parts)
            return None if starred else parts[place]
        case ast.Dict(keys, values):
            named = zip(keys, values, strict=True)
            return next((one for key, one in named if isinstance(key, ast.Constant) and key.value == place), None)
        case ast.Call(keywords=keywords):
            return next((one.value for one in keywords if one.arg == place), None)
    return None
