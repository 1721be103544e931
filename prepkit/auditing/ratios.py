"""Ratios of two policies, which leave 1 once the policy has stepped since it drew the samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from attrs import define, field
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from prepkit.auditing.terms import graph, name_of
from prepkit.observe.prepared.around import frames_above, line_of_program
from prepkit.observe.prepared.instead import around_calls

DRAWS = ("multinomial", "normal", "bernoulli")
"""Functions of torch by which distributions draw; by the first of them programs draw actions and tokens too."""
FEWEST = 8
"""Samples of a ratio."""
TIMES = 3
"""Losses of one line whose ratio is 1, behind a step since the last draw."""


@define(eq=False)
class Ratios:
    """Listens inside ``on()``."""

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
            yield

    def idle(self) -> tuple[str, ...]:
        """Lines whose losses have a ratio that is always 1."""
        return tuple(line for line, times in self._idle.items() if times >= TIMES)

    def _draws(self, name: str, plain: Any, *given: Any, **named: Any) -> Any:
        caller = next(frames_above(__file__)).f_globals.get("__name__", "")
        if name == "multinomial" or caller.startswith("torch.distributions"):
            self._stepped = 0
        return plain(*given, **named)

    def _steps(self, *_: Any) -> None:
        if self._stepped is not None:
            self._stepped += 1

    def _backward(self, plain: Any, tensors: Any, *given: Any, **named: Any) -> Any:
        if self._stepped and not torch.compiler.is_compiling():
            loss = tensors[0] if isinstance(tensors, tuple | list) and len(tensors) == 1 else tensors
            if type(loss) is Tensor and loss.grad_fn is not None and any(map(_is_one, graph(loss.grad_fn))):
                self._idle[line_of_program(frames_above(__file__))] += 1
        return plain(tensors, *given, **named)


def _is_one(node: Any) -> bool:
    """Return whether it is the exponential of a difference from what does not train, and 1 for every sample."""
    if name_of(node) != "Exp":
        return False
    before = node.next_functions[0][0]
    if before is None or name_of(before) != "Sub" or sum(one is not None for one, _ in before.next_functions) != 1:
        return False
    ratio = node._saved_result
    return ratio.numel() >= FEWEST and bool((ratio == 1).all())
