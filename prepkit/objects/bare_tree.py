"""The tree of modules as its author built it, for a while: libraries look modules up by the names that they gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from attrs import frozen
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import Module

from prepkit.findings import RunRefused
from prepkit.objects import names
from prepkit.rules import found

SAVE = "save_pretrained"
"""What transformers, diffusers and peft call it."""


@contextmanager
def bare_tree(model: Module) -> Iterator[Module]:
    """Inside, no wrapper stands below the model: checkpointing, compilation and FSDP1 have put a segment into names.

    Yields the user's root. Nothing may run forward meanwhile. What was taken out is put back, whatever is raised.
    """
    root = names.unwrap_root(model)[-1]
    taken: list[tuple[Module, str, Module]] = []
    try:
        _take_out(root, taken, {id(root)})
        yield root
    finally:
        for parent, name, wrapper in reversed(taken):
            parent._modules[name] = wrapper


def _take_out(parent: Module, taken: list[tuple[Module, str, Module]], seen: set[int]) -> None:
    for name, child in list(parent._modules.items()):
        if child is None:
            continue
        inner = names.unwrap(child)[-1]
        if inner is not child:
            taken.append((parent, name, child))
            parent._modules[name] = inner
        if id(inner) not in seen:
            seen.add(id(inner))
            _take_out(inner, taken, seen)


def guard_save(model: Module) -> None:
    """Puts a ``SaveWithoutWrappers`` in the place of the user's root's ``save_pretrained``, where it has one."""
    root = names.unwrap_root(model)[-1]
    saves = getattr(root, SAVE, None)
    if callable(saves) and not isinstance(saves, SaveWithoutWrappers):
        vars(root)[SAVE] = SaveWithoutWrappers(root, saves)


@frozen(eq=False)
class SaveWithoutWrappers:
    """``save_pretrained`` of a prepared model: peft finds no adapter under the names of checkpoint wrappers."""

    model: Module
    save: Callable[..., Any]

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.save

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Saves as the class does. Raises ``RunRefused`` where the parameters are shards, which it would write."""
        if "state_dict" not in kwargs and is_sharded(self.model):
            what = "save_pretrained would write this rank's shards"
            raise RunRefused((found("save.shards", "model.save_pretrained", what),))
        with bare_tree(self.model):
            return self.save(*args, **kwargs)


def is_sharded(model: Module) -> bool:
    """Return whether a rank holds parts of its parameters, or of what FSDP1 has made of them."""
    sharded = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    return sharded or any(
        isinstance(p, DTensor) or hasattr(p, "ds_tensor") or p.numel() == 0 for p in model.parameters()
    )
