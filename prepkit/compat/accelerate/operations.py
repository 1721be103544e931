"""Values of all ranks: gathered, reduced, padded, sent from one. The ranks agree on the shapes before any is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from prepkit.compat.accelerate import group
from prepkit.compat.accelerate.not_offered import NotOffered
from prepkit.ranks import launcher
from prepkit.ranks.world import Ranks, world


class DistributedOperationException(RuntimeError):
    """The ranks give tensors to one operation that do not go together; raised on each of them, and nothing was sent."""


def gather(value: Any) -> Any:
    """Tensors of equal shape of all ranks, nested or not, joined in the first dimension. Collective."""
    return _on_tensors(value, _gathered, "gather", lambda tensor: tuple(tensor.shape))


def reduce(value: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Tensors of equal shape as ``sum``, ``mean`` or ``max`` over the ranks; on XLA times ``scale``. Collective."""
    if reduction not in _REDUCTIONS:
        raise NotOffered(f"reduce({reduction!r})", f"write {', '.join(_REDUCTIONS)}")

    def reduced(tensor: Tensor) -> Tensor:
        ranks = world()
        total = _REDUCTIONS[reduction](ranks, tensor)
        factor = scale if tensor.device.type == "xla" else 1.0
        factor = factor / ranks.size if reduction == "mean" else factor
        return (total if factor == 1 else total * factor).to(tensor.device)

    return _on_tensors(value, reduced, "reduce", lambda tensor: tuple(tensor.shape))


_REDUCTIONS: dict[str, Callable[[Ranks, Tensor], Tensor]] = {
    "mean": Ranks.total,
    "sum": Ranks.total,
    "max": Ranks.worst,
    "none": lambda _, tensor: tensor.detach().clone(),
}


def broadcast(value: Any, from_process: int = 0) -> Any:
    """The tensors of one rank, on all of them. Collective."""

    def sent(tensor: Tensor) -> Tensor:
        mine = _travelling(tensor).clone()
        world().send(mine, from_process)
        return mine.to(tensor.device)

    return _on_tensors(value, sent, "broadcast", lambda tensor: tuple(tensor.shape))


def pad_across_processes(value: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Tensors as long in ``dim`` as the longest of all ranks, filled up with ``pad_index``. Collective.

    A tensor that has no such dimension stays as it is.
    """

    def padded(tensor: Tensor) -> Tensor:
        if not -tensor.ndim <= dim < tensor.ndim:
            return tensor
        longest = max(_everyone(tensor.shape[dim]))
        shape = list(tensor.shape)
        shape[dim] = longest - shape[dim]
        more = tensor.new_full(shape, pad_index)
        return torch.cat((more, tensor) if pad_first else (tensor, more), dim)

    def without_dim(tensor: Tensor) -> tuple[int, ...]:
        inner = -tensor.ndim <= dim < tensor.ndim
        return tuple(0 if inner and at == dim % tensor.ndim else size for at, size in enumerate(tensor.shape))

    return _on_tensors(value, padded, "pad_across_processes", without_dim)


def gather_object(value: Any) -> list[Any]:
    """The items of every rank's list, rank by rank. Collective; what is sent is pickled."""
    return [item for items in _everyone(value) for item in items]


def broadcast_object_list(value: list[Any], from_process: int = 0) -> list[Any]:
    """Puts the items of one rank's list into that of every rank. Collective; what is sent is pickled."""
    group.join(_device())
    value[:] = world().sent_by(from_process, value)
    return value


def is_tensor(value: Any) -> bool:
    """Return whether it can be gathered as it is."""
    return isinstance(value, Tensor)


def everywhere(holds: bool) -> bool:
    """Return whether it holds on every rank. Collective."""
    return all(_everyone(bool(holds)))


def _on_tensors(value: Any, act: Callable[[Tensor], Tensor], name: str, shape: Callable[[Tensor], Any]) -> Any:
    leaves, form = pytree.tree_flatten(value)
    mine = [(shape(leaf), str(leaf.dtype)) for leaf in leaves if isinstance(leaf, Tensor)]
    group.join(next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), _device()))
    told = _everyone(mine)
    for rank, theirs in enumerate(told):
        if theirs != told[0]:
            raise DistributedOperationException(
                f"{name}: rank 0 gives {_described(told[0])}, rank {rank} gives {_described(theirs)}; "
                "give tensors of one shape and dtype, as accelerator.pad_across_processes makes them"
            )
    return pytree.tree_unflatten([act(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], form)


def _described(tensors: list[tuple[Any, str]]) -> str:
    return ", ".join(f"{tuple(shape)} of {dtype}" for shape, dtype in tensors) or "no tensor"


def _everyone(mine: Any) -> list[Any]:
    group.join(_device())
    return world().gather(mine)


def _gathered(tensor: Tensor) -> Tensor:
    """A scalar counts as one row where there are several ranks; alone, nothing is joined to anything."""
    mine = _travelling(tensor)
    if not world().carries_data:
        return mine
    mine = mine[None] if mine.ndim == 0 else mine
    return torch.cat(world().parts(mine)).to(tensor.device)


def _travelling(tensor: Tensor) -> Tensor:
    mine = tensor.detach().contiguous()
    return mine.to(world().wire(mine.device))


def _device() -> torch.device:
    """Return where a rank computes that has said nothing."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, launcher.local_rank())


def synchronize_rng_states(rng_types: Sequence[str], generator: torch.Generator | None = None) -> None:
    """The states of ``torch``, ``cuda`` or the ``generator`` that is given become those of rank 0. Collective.

    Prepared loaders need none of it: ``prepare`` has put their generators into one state (behaviour DL-10).
    """
    for kind in (str(getattr(one, "value", one)) for one in rng_types):
        if kind == "torch":
            torch.set_rng_state(broadcast(torch.get_rng_state()))
        elif kind == "cuda":
            torch.cuda.set_rng_state(broadcast(torch.cuda.get_rng_state()))
        elif kind == "generator" and generator is not None:
            generator.set_state(broadcast(generator.get_state()))
        else:
            raise NotOffered(f"synchronize_rng_states({kind!r})", "write torch, cuda, or generator and pass one")
