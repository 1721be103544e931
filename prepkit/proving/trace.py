"""What each module and operator of a window has computed, in a few numbers, so that two windows can be compared."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from prepkit.objects import names
from prepkit.objects.local_part import local
from prepkit.proving import tree
from prepkit.proving.record_file import Traced

ELEMENTS = 64
"""Of each output, beside its norm."""
MOST = 20_000
"""Outputs that are kept of a window."""
COMPILED = "compiled"
"""In the place of an operator: the output is that of a compiled module, of which nothing inside is noted."""


@define(eq=False)
class Tracer:
    """Notes outputs in the order in which they are computed."""

    entries: list[Traced] = field(factory=list)
    values: list[Tensor] = field(factory=list)
    micro: int = 0
    backward: bool = False
    _path: list[str] = field(factory=lambda: [""])
    _busy: bool = False
    _made: WeakIdKeyDictionary = field(factory=WeakIdKeyDictionary)
    """Output of an operator to its place."""
    _mode: _Operators | None = None
    _pauses: bool = False

    @contextmanager
    def on(self, root: nn.Module) -> Iterator[None]:
        """Hooks of every module are on inside; of what is compiled, of the outermost one alone, which runs compiled."""
        inside: set[nn.Module] = set()
        with ExitStack() as stack:
            for site in names.sites(root):
                if site.first and site.module not in inside:
                    if (compiled := next(filter(_is_compiled, site.stack), None)) is None:
                        enters, leaves = self._entering(site.path), self._leaving(site.path)
                        stack.callback(site.module.register_forward_pre_hook(enters, prepend=True).remove)
                        stack.callback(site.module.register_forward_hook(leaves, always_call=True).remove)
                    else:
                        inside |= set(compiled.modules())
                        on_calls(compiled, self._pausing(site.path), self._resuming(site.path), stack)
            yield

    def listens(self) -> None:
        """Notes operators from now on."""
        self.hushes()
        self._mode = _Operators(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def hushes(self) -> None:
        """Notes no more of them."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._mode = None

    def clear(self) -> None:
        """What was noted is no part of the window."""
        self.entries.clear()
        self.values.clear()
        self._made.clear()

    def fed(self, given: Any) -> tuple[int, ...]:
        """Places of the operators that have made these tensors."""
        return tuple(self._made[one] for one in tree.tensors_of(given) if one in self._made)

    def note(self, kind: str, what: str, tensor: Tensor, fed: tuple[int, ...] = (), *, compiled: bool = False) -> None:
        """Keeps one output."""
        if self._busy or len(self.entries) >= MOST or not tensor.is_floating_point() or tensor.is_meta:
            return
        self._busy = True
        try:
            row = local(tensor).detach().reshape(-1)
            self.entries.append(
                Traced(
                    micro=self.micro,
                    kind=kind,
                    path=self._path[-1] if kind == "operator" else what,
                    operator=what if kind == "operator" else COMPILED * compiled,
                    shape=tuple(local(tensor).shape),
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    fed=fed,
                )
            )
            if kind == "operator":
                self._made[tensor] = len(self.entries) - 1
            self.values.append(sketch(row))
        finally:
            self._busy = False

    def _entering(self, path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if not torch.compiler.is_compiling():  # a function that calls modules may be compiled
                self._path.append(path)

        return hook

    def _pausing(self, path: str) -> Callable[..., None]:
        """The hook before what is compiled, which runs eagerly where something listens to operators."""
        enters = self._entering(path)

        def hook(*_: Any) -> None:
            enters()
            self._pauses = self._mode is not None
            self.hushes()

        return hook

    def _resuming(self, path: str) -> Callable[..., None]:
        leaves = self._leaving(path, compiled=True)

        def hook(module: nn.Module, given: Any, output: Any) -> None:
            leaves(module, given, output)
            if self._pauses and path:  # behind the root there is nothing to listen to
                self.listens()

        return hook

    def _leaving(self, path: str, *, compiled: bool = False) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            if len(self._path) > 1:
                self._path.pop()
            if self.backward or output is None:  # what checkpointing computes again
                return
            for at, tensor in enumerate(tree.tensors_of(output)):
                what = path if at == 0 else f"{path} (output {at})"
                self.note("module", what, tensor, compiled=compiled)
                if tensor.requires_grad:
                    tensor.register_hook(self._arriving(what))  # type: ignore[no-untyped-call]

        return hook

    def _arriving(self, what: str) -> Callable[[Tensor], None]:
        return lambda grad: None if grad is None else self.note("gradient", what, grad)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracer = tracer

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """See torch: with it a compiled function is not run eagerly."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        fed = self.tracer.fed((args, kwargs or {}))
        output = func(*args, **(kwargs or {}))
        fills = "empty" not in str(func)  # else what stands there is anything
        if func.namespace == "aten" and fills and not (self.tracer.backward or torch.compiler.is_compiling()):
            for tensor in tree.tensors_of(output):
                if type(tensor) is Tensor:
                    self.tracer.note("operator", str(func), tensor, fed)
        return output


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or "OptimizedModule" in names.known_bases(type(module))


def sketch(row: Tensor) -> Tensor:
    """Norm and some elements, the same ones of every output of its size."""
    if row.numel() > ELEMENTS:
        generator = torch.Generator().manual_seed(row.numel())
        picked = row[torch.randint(row.numel(), (ELEMENTS,), generator=generator).to(row.device)]
    else:
        picked = row
    return torch.cat((torch.linalg.vector_norm(row, dtype=torch.float64).view(1), picked.double())).cpu()


def on_calls(root: nn.Module, enters: Callable[..., None], leaves: Callable[..., None], stack: ExitStack) -> None:
    """Lets both hear of calls of a model until the stack ends."""
    if (compiled := root._compiled_call_impl) is not None:  # hooks would be compiled with the model

        def call(*args: Any, **kwargs: Any) -> Any:
            enters(root, args, kwargs)
            output = compiled(*args, **kwargs)
            leaves(root, args, output)
            return output

        root._compiled_call_impl = call
        stack.callback(setattr, root, "_compiled_call_impl", compiled)
        return
    last, hooks = root.register_forward_hook(leaves), cast("OrderedDict[int, Any]", root._forward_hooks)

    def begins(*call: Any) -> None:
        if last.id in hooks:  # else it was taken off in this very call
            hooks.move_to_end(last.id)  # behind those that came later: the loop gets what they return
            enters(*call)

    stack.callback(last.remove)
    stack.callback(root.register_forward_pre_hook(begins, prepend=True, with_kwargs=True).remove)
