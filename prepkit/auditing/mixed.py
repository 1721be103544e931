"""Weights that a program averages with themselves, as with a teacher that is the student."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from prepkit.observe.prepared.around import Line, frames_above, is_of_library
from prepkit.observe.prepared.instead import around_calls

NEAR = 1e-6
"""So near to 1 is the sum of both factors of an average."""
MOST_LINES = 64


@define(eq=False)
class SelfAverages:
    """Listens inside ``on()`` to the averages that a program makes in place."""

    quiet: bool = False
    """Whether another look has told of it."""
    _apart: set[Line] = field(factory=set)
    """Lines that average something with something else."""
    _itself: dict[Line, set[int]] = field(factory=dict)
    """Lines that average memory with itself, and where it lies."""
    _trained: dict[Line, None] = field(factory=dict)
    """Those of them whose memory an optimizer steps."""
    _kept: tuple[int, float] = (0, 0.0)
    """What was multiplied last, and by what."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        with ExitStack() as stack:
            stack.enter_context(around_calls(Tensor, "lerp_", self._lerps))
            stack.enter_context(around_calls(Tensor, "mul_", self._keeps))
            stack.enter_context(around_calls(Tensor, "add_", self._adds))
            stack.enter_context(around_calls(torch, "_foreach_lerp_", self._lerps_each))
            stack.callback(register_optimizer_step_pre_hook(self._steps).remove)
            yield

    def told(self) -> tuple[str, ...]:
        """The lines that were heard so far."""
        found = [one for one in self._trained if one not in self._apart and not self.quiet]
        return tuple(f"{Path(code.co_filename).name}:{line}" for code, line in found)

    def _lerps(self, plain: Any, one: Any, *given: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            self._hears([(one, given[0] if given else named.get("end"))])
        return plain(one, *given, **named)

    def _lerps_each(self, plain: Any, *given: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling() and len(given) > 1:
            self._hears([*zip(*given[:2], strict=False)])
        return plain(*given, **named)

    def _keeps(self, plain: Any, one: Any, *given: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            factor = given[0] if given else None
            self._kept = (_place(one), factor) if type(factor) is float else (0, 0.0)
        return plain(one, *given, **named)

    def _adds(self, plain: Any, one: Any, *given: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            (place, factor), self._kept = self._kept, (0, 0.0)
            part = named.get("alpha")
            if place and given and type(part) is float and abs(factor + part - 1) < NEAR and _place(one) == place:
                self._hears([(one, given[0])])
        return plain(one, *given, **named)

    def _hears(self, pairs: list[tuple[Any, Any]]) -> None:
        frame = next(frames_above(__file__), None)
        if frame is None or is_of_library(frame) or torch._C._functorch.maybe_current_level() is not None:
            return
        line = (frame.f_code, frame.f_lineno)
        if line in self._apart or len(self._itself) >= MOST_LINES:
            return
        places = [_place(one) if _are_one(one, other) else 0 for one, other in pairs]
        if all(places):
            self._itself.setdefault(line, set()).update(places)
        else:
            self._apart.add(line)

    def _steps(self, optimizer: Any, *_: Any) -> None:
        waiting = [line for line in self._itself if line not in self._trained and line not in self._apart]
        if waiting and not torch.compiler.is_compiling():
            params = [param for group in optimizer.param_groups for param in group["params"]]
            held = {_place(param) for param in params if param.requires_grad and param.grad is not None} - {0}
            self._trained |= {line: None for line in waiting if self._itself[line] & held}


def _are_one(one: Any, other: Any) -> bool:
    """Return whether both are the same numbers of one memory."""
    place = _place(one)
    return place > 0 and place == _place(other) and (one.shape, one.stride()) == (other.shape, other.stride())


def _place(one: Any) -> int:
    """Where a plain tensor lies; 0: it has no place, or no numbers."""
    plain = type(one) in (Tensor, nn.Parameter) and one.layout == torch.strided and not one.is_meta
    return one.data_ptr() if plain and one.numel() and torch._C._functorch.maybe_current_level() is None else 0
