"""The forward that ``AutocastFP8Forward`` puts in the place of another. At module level, so that models pickle."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from attrs import frozen
from torch.nn import Module

MARK = "_prepkit_fp8"
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
