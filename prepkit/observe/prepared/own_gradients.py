"""The gradients of a window, as they lie on this rank before the optimizer acts, by engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from prepkit.objects import fsdp1_flat, names
from prepkit.objects.local_part import local


@frozen(kw_only=True)
class Gradient:
    """What this rank knows of the gradient of one trained parameter."""

    name: str
    """Canonical name of the parameter."""
    missing: bool
    """Whether it has none, though this rank holds some of the parameter's elements."""
    largest: Tensor | None
    """The largest absolute value of this rank's part, a scalar; None where there is no part, or it was not seen."""
    misplaced: bool = False
    """Whether placements or dtype are not the parameter's."""


def gradients(model: Module) -> Iterator[Gradient]:
    """The gradients of all trained parameters, in the order of the model; an engine's that keeps its own is watched."""
    if isinstance(model, FullyShardedDataParallel):
        yield from _flat(model)
        return
    for name, param in names.named_parameters(model).items():
        if param.requires_grad:
            yield _of(name, param, param.grad)


def _flat(model: Module) -> Iterator[Gradient]:
    """Of FSDP1's flat parameters each rank holds a shard, in which a parameter may have no element."""
    shards = fsdp1_flat.flat_shards(model)
    params = names.named_parameters(model)
    for name, shard in shards.items():
        holder = params[name] if shard.original else shard.flat
        if holder.requires_grad:
            yield _of(name, holder, holder.grad, here=shard.last > shard.first)
    for name, param in params.items():  # of modules that FSDP1 ignores
        if name not in shards and param.requires_grad and "_flat_param" not in name:
            yield _of(name, param, param.grad)


def _of(name: str, param: Parameter, grad: Tensor | None, *, here: bool = True) -> Gradient:
    if grad is None:
        return Gradient(name=name, missing=here and local(param).numel() > 0, largest=None)
    part = _values(local(grad).detach())
    largest = part.abs().max().float() if part.numel() else None
    placed = grad.placements == param.placements if isinstance(grad, DTensor) and isinstance(param, DTensor) else True
    return Gradient(name=name, missing=False, largest=largest, misplaced=not placed or grad.dtype != param.dtype)


def _values(gradient: Tensor) -> Tensor:
    """The numbers that are there: of a sparse gradient (``nn.Embedding(sparse=True)``) those of its rows."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


@define
class Watched:
    """The gradients of an engine that takes them away as they come, such as DeepSpeed's, noted in one window."""

    model: Module
    seen: dict[str, Tensor] = field(factory=dict)
    """Name to the largest absolute value among the gradients of this rank's micro-batches, before any reduction."""
    hooks: list[Any] = field(factory=list)

    def begin(self) -> None:
        """Hooks every trained parameter (``Tensor.register_hook``), which changes no gradient."""
        for name, param in names.named_parameters(self.model).items():
            if param.requires_grad and hasattr(param, "register_hook"):  # MS-AMP's scaled weights have none
                self.hooks.append(param.register_hook(self._note(name)))  # type: ignore[no-untyped-call]

    def end(self) -> Iterator[Gradient]:
        """Takes the hooks away, and gives what they saw."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        for name, param in names.named_parameters(self.model).items():
            if param.requires_grad:
                missing = name not in self.seen and hasattr(param, "register_hook")
                yield Gradient(name=name, missing=missing, largest=self.seen.get(name))

    def _note(self, name: str) -> Any:
        def note(grad: Tensor) -> None:
            if grad.numel():
                largest = _values(grad.detach()).abs().max().float()
                before = self.seen.get(name)
                self.seen[name] = largest if before is None else torch.maximum(before, largest)
            else:
                self.seen.setdefault(name, torch.zeros((), device=grad.device))

        return note
