"""Replacement of a method that runs as the forward does. At module level, so that models can be pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import evolve, frozen
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from prepkit.objects.forward import AutocastedForward, CastedForward, FP8Forward

MARK = "_prepkit_entry_points"
"""Attribute of the module that has such methods: their names, and which transformers was told of."""

IN_STEP = "_is_fsdp_managed_module"
"""Attribute that transformers' ``generate`` reads: ranks go on until all are done, because they gather together."""

_Patched = AutocastedForward | CastedForward | FP8Forward
_TAKEN = ("forward", "_compiled_call_impl")


def like_forward(module: Module, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method with every patch of prepkit's that the module's forward has: autocast, casts, float8."""
    layers: list[_Patched] = []
    patched = vars(module).get("forward")
    while isinstance(patched, _Patched):
        layers.append(patched)
        patched = patched.forward
    for layer in reversed(layers):
        method = evolve(layer, forward=method)
    return method


@frozen(eq=False)
class ThroughWrapper:
    """Calls ``method`` of ``inner`` inside the forward of ``outer``: DDP, FSDP1 or a DeepSpeed engine.

    For the time until the wrapper calls the module, the method stands in the place of its forward; inside the method
    ``self(...)`` is the module itself again. Hooks of both modules run; compiled calls of both are passed by.
    """

    outer: Module
    inner: Module
    method: Callable[..., Any]

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the method returns. Without a tensor that requires a gradient, DDP expects no backward."""
        own = vars(self.inner)
        taken = {name: own.pop(name) for name in _TAKEN if name in own}
        outer: Any = self.outer
        ddp = isinstance(outer, DistributedDataParallel)
        averages = ddp and outer.require_backward_grad_sync

        def put_back() -> None:
            own.pop("forward", None)
            own.update(taken)

        def once(*args: Any, **kwargs: Any) -> Any:
            put_back()
            made = self.method(*args, **kwargs)
            if ddp and not _differentiable(made):
                outer.require_backward_grad_sync = False
            return made

        own["forward"] = once
        try:
            return outer._call_impl(*args, **kwargs)  # the call without what was compiled of it
        finally:
            put_back()
            if ddp:
                outer.require_backward_grad_sync = averages


def _differentiable(made: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(made))
