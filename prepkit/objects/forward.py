"""The forward that ``AutocastForward`` puts in the place of a model's own. At module level, so that models pickle."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch.nn import Module
from torch.utils._pytree import tree_map  # torch has no public name for it; transformers registers its outputs here

MARK = "_prepkit_autocast"
"""Attribute that a module with such a forward carries."""


@frozen(eq=False)
class AutocastedForward:
    """Calls ``forward`` under autocast and casts its 16-bit floating outputs (AMP-4, AMP-5).

    ``forward`` is the model's bound method, so a deep copy of the model calls the copy; or whatever callable stood in
    the instance. ``inspect.signature`` shows the signature of ``forward``, which trainers read to drop columns.
    """

    forward: Callable[..., Any]
    device: str
    dtype: torch.dtype
    output_dtype: torch.dtype

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of ``forward``, with 16-bit floats cast to ``output_dtype``."""
        with torch.autocast(self.device, dtype=self.dtype):
            outputs = self.forward(*args, **kwargs)
        return cast_floats(outputs, self.output_dtype)


@frozen(eq=False)
class CastedForward:
    """Calls ``forward`` with floating inputs in one dtype, and casts its 16-bit floating outputs to another.

    For models whose parameters are in ``dtype`` themselves, where autocast has nothing to do. Otherwise as above.
    """

    forward: Callable[..., Any]
    dtype: torch.dtype
    output_dtype: torch.dtype

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of ``forward``, with 16-bit floats cast to ``output_dtype``."""
        args, kwargs = tree_map(partial(_cast_input, dtype=self.dtype), (args, kwargs))
        return cast_floats(self.forward(*args, **kwargs), self.output_dtype)


def _cast_input(leaf: Any, *, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """Casts every float16 and bfloat16 tensor in nested containers; all else is the same object.

    Sees through what torch's pytree knows (lists, tuples, named tuples, dicts, transformers' ``ModelOutput``) and
    through dataclasses, of which it returns shallow copies: accelerate leaves those in 16 bits (G-65).
    """
    return tree_map(partial(_cast_leaf, dtype=dtype), tree)


def _cast_leaf(leaf: Any, *, dtype: torch.dtype) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.to(dtype) if leaf.dtype in (torch.float16, torch.bfloat16) else leaf
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        clone = copy.copy(leaf)  # not ``replace``: fields may be frozen, or no arguments of the constructor
        for field in dataclasses.fields(leaf):
            if hasattr(leaf, field.name):
                object.__setattr__(clone, field.name, cast_floats(getattr(leaf, field.name), dtype))
        return clone
    return leaf


FP8_MARK = "_prepkit_fp8"
"""Attribute that a module with such a forward carries."""


@frozen(eq=False)
class FP8Forward:
    """Calls ``forward`` under TransformerEngine's autocast, switched on while ``module`` trains (behaviour H-33).

    ``forward`` is whatever callable stood there, bound or plain: it is called as it was, and given no ``self`` (G-32).
    """

    module: Module
    forward: Callable[..., Any]
    recipe: Any
    during_eval: bool

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of ``forward``."""
        with autocast(enabled=self.during_eval or self.module.training, recipe=self.recipe):
            return self.forward(*args, **kwargs)


def autocast(*, enabled: bool, recipe: Any) -> AbstractContextManager[Any]:
    """TransformerEngine's autocast; the older name takes the recipe under another keyword (TE < 2.9)."""
    import transformer_engine.pytorch as te

    made: AbstractContextManager[Any]
    if hasattr(te, "autocast"):
        made = te.autocast(enabled=enabled, recipe=recipe)
    else:
        made = te.fp8_autocast(enabled=enabled, fp8_recipe=recipe)
    return made
