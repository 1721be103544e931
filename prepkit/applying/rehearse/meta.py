"""A copy of model and optimizer without data: every tensor on meta, all else as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from prepkit.objects.fsdp2_units import is_unit


def meta_copy(
    model: Module, optimizer: Optimizer | None = None, twin: Callable[[Tensor], Tensor] | None = None
) -> tuple[Module, Optimizer | None]:
    """Copies of both with every parameter, buffer and state tensor on meta; the originals are not touched.

    ``twin`` makes another kind of tensor without data instead, such as ``fake_twin``.

    Identity is kept where ``Module.to("meta")`` loses it: tied parameters stay one, the copied optimizer holds the
    copied model's parameters, and non-persistent buffers come along. Gradients do not. Raises what ``copy.deepcopy``
    raises for a model that cannot be copied, and ``ValueError`` for one that ``fully_shard`` has cut.
    """
    if any(is_unit(module) for module in model.modules()):
        what = "is sharded already, and torch copies no such model; give it as it was before fully_shard, with its plan"
        raise ValueError(f"{type(model).__name__} {what}")
    memo: dict[int, object] = {id(tensor): (twin or _twin)(tensor) for tensor in _tensors(model, optimizer)}
    twins: tuple[Module, Optimizer | None] = copy.deepcopy((model, optimizer), memo)
    return twins


def _tensors(model: Module, optimizer: Optimizer | None) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    if optimizer is not None:
        yield from (param for group in optimizer.param_groups for param in group["params"])
        yield from (value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))


def _twin(tensor: Tensor) -> Tensor:
    bare = torch.empty_like(tensor, device="meta", requires_grad=False)
    return Parameter(bare, tensor.requires_grad) if isinstance(tensor, Parameter) else bare


def fake_twin(mode: FakeTensorMode) -> Callable[[Tensor], Tensor]:
    """Makes tensors that say they are on the CPU: FSDP1 fills meta tensors with values, and moves them."""

    def make(tensor: Tensor) -> Tensor:
        with mode:
            bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            return Parameter(bare, tensor.requires_grad) if isinstance(tensor, Parameter) else bare

    return make


def zero_twin(tensor: Tensor) -> Tensor:
    """Zeros on the CPU, for a backend that needs memory to point at."""
    bare = torch.zeros_like(tensor, device="cpu", requires_grad=False)
    return Parameter(bare, tensor.requires_grad) if isinstance(tensor, Parameter) else bare
