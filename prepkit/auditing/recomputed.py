"""What checkpoints of torch are called with while a script runs, and what their second forward would do otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.distributed._composable import checkpoint_activation
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import checkpoint as checkpoints

from prepkit.observe.prepared.around import frames_above, line_of_program
from prepkit.observe.prepared.instead import around_calls
from prepkit.observe.prepared.look import averages
from prepkit.observe.prepared.modules import generator


@define(eq=False)
class Recomputed:
    """Listens inside ``on()`` to whatever of torch checkpoints, reentrant or not: one function, or some in a row."""

    _trains: bool = False
    """Whether the reentrant checkpoint that begins computes gradients."""
    forgetful: dict[str, None] = field(factory=dict)
    """Functions that draw, and would draw otherwise in their second forward."""
    renormalised: dict[str, None] = field(factory=dict)
    """Functions over batch norms that would average what they see a second time."""
    _reentrant: dict[tuple[str, tuple[int, ...]], None] = field(factory=dict)
    """Lines of checkpoints, and the ``id``s of parameters inside."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        without = "_checkpoint_without_reentrant_generator"
        reentrant = around_calls(checkpoints.CheckpointFunction, "forward", self._reenters)
        applied = around_calls(checkpoints.CheckpointFunction, "apply", self._applies)
        with applied, reentrant, around_calls(checkpoints, without, self._checkpoints, also=checkpoint_activation):
            yield

    def without_gradient(self, first: Mapping[int, str]) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield lines of reentrant checkpoints over no input with a gradient, and the parameters inside, by name."""
        for line, held in self._reentrant:
            if first.keys() >= set(held):
                yield line, tuple(first[one] for one in held)

    def _applies(self, plain: Any, *given: Any) -> Any:
        self._trains = torch.is_grad_enabled()
        return plain(*given)

    def _reenters(self, plain: Any, ctx: Any, function: Any, keeps: bool, *given: Any) -> Any:
        trains = self._trains
        with self._recomputed(function, keeps=keeps) as ran:
            result = plain(ctx, function, keeps, *given)
        if trains and not any(one.requires_grad for one in given if isinstance(one, Tensor)):
            modules = ran or [part for module in _modules_in(function) for part in module.modules()]
            params = (param for module in modules for param in module.parameters(recurse=False))
            held = tuple(dict.fromkeys(id(param) for param in params if param.requires_grad))
            if held:
                self._reentrant[line_of_program(frames_above(__file__)), held] = None
        return result

    def _checkpoints(
        self, plain: Any, function: Any, keeps: bool = True, around: Any = None, *given: Any, **named: Any
    ) -> Iterator[None]:
        around = checkpoints.noop_context_fn if around is None else around
        before_and_after = plain(function, keeps, around, *given, **named)
        if not torch.is_grad_enabled():
            yield from before_and_after
            return
        next(before_and_after)
        with self._recomputed(function, keeps=keeps or around is not checkpoints.noop_context_fn):
            try:
                yield
            except BaseException as error:
                before_and_after.throw(error)
                raise
        yield from before_and_after

    @contextmanager
    def _recomputed(self, function: Any, *, keeps: bool) -> Iterator[list[nn.Module]]:
        """Around the first forward of what is checkpointed; ``keeps``: its second will draw the same.

        Gives the modules that have run inside.
        """
        name = type(function).__name__ if isinstance(function, nn.Module) else _called(function)
        ran: list[nn.Module] = []

        def enters(module: nn.Module, _: Any) -> None:
            ran.append(module)
            if averages(module):
                self.renormalised[name] = None

        if isinstance(function, nn.Module):
            enters(function, None)  # whose own hooks have begun by now, where one of them checkpoints
        handle = register_module_forward_pre_hook(enters)
        before = None if keeps else _drawn()
        try:
            yield ran
        finally:
            handle.remove()
        if before is not None and before != _drawn():
            self.forgetful[name] = None


def _drawn() -> tuple[float, ...]:
    """Where the generators of the CPU and of the accelerator are."""
    device = torch.accelerator.current_accelerator()
    return tuple(generator(kind) for kind in dict.fromkeys(("cpu", device.type if device is not None else "cpu")))


def _called(function: Any) -> str:
    """The name of a function, of a method with its class, or of what a ``partial`` calls; of torch's own, the line."""
    inside = getattr(function, "func", function)
    if getattr(inside, "__module__", "") == checkpoints.__name__:
        return f"{inside.__qualname__.partition('.')[0]} ({line_of_program(frames_above(__file__))})"
    return str(getattr(inside, "__qualname__", type(inside).__name__))


def _modules_in(function: Any, depth: int = 3) -> Iterator[nn.Module]:
    """Yield the modules that a function runs, as far as it is bound to them, or its code names them."""
    match function:
        case nn.Module():
            yield function
        case partial() if depth:
            for one in (function.func, *function.args, *function.keywords.values()):
                yield from _modules_in(one, depth - 1)
        case MethodType() if isinstance(function.__self__, nn.Module):
            named = [] if function.__name__ in ("__call__", "forward") else _named(function.__self__, function.__code__)
            yield from named or [function.__self__]
        case FunctionType() if depth:
            code, known = function.__code__, function.__globals__
            cells = [one.cell_contents for one in function.__closure__ or () if one != CellType()]
            held = (*cells, *(function.__defaults__ or ()))
            for one in (*held, *(known[name] for name in code.co_names if name in known)):
                if isinstance(one, nn.Module):
                    yield from _named(one, code) or [one]
            for one in held:
                if isinstance(one, partial | MethodType | FunctionType):
                    yield from _modules_in(one, depth - 1)


def _named(module: nn.Module, code: CodeType) -> list[nn.Module]:
    """The modules inside it that code names, as where it says ``self.block(x)``."""
    return [child for name, child in module._modules.items() if name in code.co_names and child is not None]
