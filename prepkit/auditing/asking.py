"""A model's forward, called once more by itself: nobody hears of it, and nothing is left of it."""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from dataclasses import is_dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves, tree_map

from prepkit.objects.local_part import local
from prepkit.objects.names import unwrap_root
from prepkit.observe.prepared.around import called_by_program, frames_above, line_of_program
from prepkit.observe.prepared.fabric import module_of
from prepkit.observe.prepared.instead import around_calls
from prepkit.observe.prepared.modules import drops
from prepkit.observe.prepared.reading import digest_of, generators_kept

SENDS = frozenset(
    {
        *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "barrier", "broadcast"),
        *(
            "reduce_scatter",
            "reduce_scatter_tensor",
            "all_to_all",
            "all_to_all_single",
            "isend",
            "irecv",
            "send",
            "recv",
        ),
    }
)
"""Of ``torch.distributed``: what needs other ranks."""


class AsksRanks(Exception):
    """A forward that is asked once more wants something of other ranks, who are not there."""


@define(eq=False)
class ModelCall:
    """One call of a module from outside of any other."""

    module: weakref.ref[nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: tuple[bool, torch.dtype]
    outputs: Any = None
    drawn: int = 0
    """Samples that the program itself has drawn for it; 0: nobody knows."""
    rows: Tensor | None = None
    """Which rows of its first output a loss has asked for, or what of them; None: none has gone backward, or nobody
    listens."""

    def asks_for(self, gradient: Tensor) -> None:
        """Hears of the gradient that comes to its first output: of where there is one, or of which sign it is.

        What is said of the same samples differs over ranks where something drops.
        """
        module = self.module()
        if gradient.dim() and gradient.layout is torch.strided and module is not None:
            part = local(gradient)
            self.rows = (part != 0).any(-1) if drops(module) else part.sign()

    @property
    def given(self) -> dict[str, Tensor]:
        """Its tensors by the name of their argument, or of their key in a table; of several in one the first."""
        module = self.module()
        names = [*signature(inside_of(module).forward).parameters] if module is not None else []
        named = {**dict(zip(names, self.args, strict=False)), **self.kwargs}
        for table in [value for value in named.values() if isinstance(value, Mapping)]:
            named |= {str(key): value for key, value in table.items()}
        firsts = {name: next(tensors(value), None) for name, value in named.items()}
        return {name: one for name, one in firsts.items() if one is not None}


def inside_of(module: nn.Module) -> nn.Module:
    """The program's own module in what libraries have put around it."""
    return unwrap_root(module_of(module))[-1]


def digest_of_calls(calls: Iterable[ModelCall]) -> str:
    """The same where models were given the same numbers, and losses have asked for the same rows of what they said.

    Empty: they were given none that tell samples apart.
    """
    calls = [*calls]
    given = [one for call in calls for one in tensors((call.args, call.kwargs)) if one.numel() >= FEWEST]
    apart = any(bool((one != one.flatten()[0]).any()) for one in given)
    return digest_of([*given, *(call.rows for call in calls if call.rows is not None)]) if apart else ""


FEWEST = 8
"""Elements of what tells samples apart."""
TOO_FAR = 1e-3
"""Of the largest output: a difference that no rounding makes."""


@frozen(kw_only=True, eq=False)
class Asking:
    """A module that is asked, and the call that it is asked with."""

    call: ModelCall
    module: nn.Module
    drops: dict[str, None] = field(factory=dict)
    """Lines that drop elements in evaluation mode."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, the module is evaluated, by itself; afterwards it and the generators are as they were."""
        plain, (autocasts, dtype) = nn.Module.__call__, self.call.autocast
        kind = next(self.module.parameters()).device.type
        nn.Module.__call__ = nn.Module._wrapped_call_impl  # type: ignore[method-assign]  # nobody hears of it
        try:
            with ExitStack() as stack:
                stack.enter_context(generators_kept())
                stack.enter_context(_generators(kind))
                stack.enter_context(_as_it_was(self.module))
                stack.enter_context(redirect_stdout(io.StringIO()))
                stack.enter_context(torch.no_grad())
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=autocasts))
                for name in ("dropout", "scaled_dot_product_attention"):
                    stack.enter_context(around_calls(nn.functional, name, partial(self._draws, name)))
                for name in sorted(SENDS):
                    stack.enter_context(around_calls(distributed_c10d, name, _refuse, also=dist))
                self.module.eval()
                yield
        finally:
            nn.Module.__call__ = plain  # type: ignore[method-assign]

    def outputs(self, change: Callable[[Tensor], Tensor] = lambda one: one) -> list[Tensor] | None:
        """What it returns for the batch, changed; None: it takes none like that."""
        args, kwargs = (each(lambda one: change(one).clone(), given) for given in (self.call.args, self.call.kwargs))
        with _as_it_was(self.module):
            try:
                result = self.module(*args, **kwargs)
            except Exception:  # of the program's own code, for a batch that it never gave
                return None
        return [one.float() for one in tensors(result) if one.is_floating_point()]

    def _draws(self, name: str, plain: Any, *given: Any, **named: Any) -> Any:
        known = dict(zip(("input", "p", "training"), given, strict=False)) | named
        if name == "dropout":
            drops = "training" not in known and known.get("p", 0.5) > 0  # said in words it is meant
        else:
            drops = (given[4] if len(given) > 4 else named.get("dropout_p", 0.0)) > 0
        if drops and called_by_program(frames_above(__file__)):
            self.drops[f"{name} ({line_of_program(frames_above(__file__))})"] = None
        return plain(*given, **named)


def _generators(kind: str) -> AbstractContextManager[None]:
    """Inside, numbers are drawn from a copy of the device's generator."""
    if kind == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[torch.accelerator.current_device_index()], device_type=kind)


def _refuse(plain: Any, *_: Any, **__: Any) -> Any:
    raise AsksRanks(plain.__name__)


@contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """Inside its buffers are copies; afterwards its modules have the attributes, modes and buffers that they had."""
    kept = [(one, dict(vars(one)), _containers(one)) for one in module.modules()]
    try:
        for one, _, _ in kept:
            for name, buffer in one._buffers.items():
                one._buffers[name] = None if buffer is None else buffer.clone()
        yield
    finally:
        for one, before, held in kept:
            vars(one).clear()
            vars(one).update(before)
            for container, content in held:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)


def _containers(module: nn.Module) -> list[tuple[Any, Any]]:
    """Its lists, sets and tables, and what is in them."""
    held = (value for value in vars(module).values() if type(value) in (list, dict, set))
    return [(value, value.copy()) for value in held]


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of trees, of the tables of libraries, and of dataclasses."""
    for one in tree_leaves(value):
        if isinstance(one, Tensor):
            yield one
        elif isinstance(items := getattr(one, "data", one), dict):  # transformers' BatchEncoding and ModelOutput
            yield from tensors(dict(items))
        elif is_dataclass(one):
            yield from tensors(vars(one))


def each(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same tree with every tensor changed."""
    return tree_map(lambda one: change(one) if isinstance(one, Tensor) else one, value)


def apart(value: Any) -> Any:
    """The same tree, and no graph behind it."""
    return each(Tensor.detach, value)


def far(one: Tensor, other: Tensor, limit: float = TOO_FAR) -> bool:
    """Return whether two of one shape differ by more than a part of the largest."""
    if one.shape != other.shape or not one.numel():
        return False
    one, other = one.float().nan_to_num(0.0, 0.0, 0.0), other.float().nan_to_num(0.0, 0.0, 0.0)
    return float((one - other).abs().max()) > limit * float(one.abs().max().clamp_min(1e-6))
