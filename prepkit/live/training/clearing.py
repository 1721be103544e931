"""``optimizer.zero_grad()`` inside a window: the gradients of its first micro-batches would be gone, without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen

_NAME = "zero_grad"


@frozen(eq=False)
class ClearingGuard:
    """An optimizer whose ``zero_grad`` asks first; torch has no hook for it. Neither pickled nor copied with it."""

    optimizer: Any
    """Torch's, or DeepSpeed's."""
    guard: Callable[..., None]
    """What stands as its ``zero_grad``."""

    def remove(self) -> None:
        """The optimizer's own stands there again, unless somebody else has put another one there."""
        if vars(self.optimizer).get(_NAME) is self.guard:
            del vars(self.optimizer)[_NAME]


def guarded(optimizer: Any, before: Callable[[], None]) -> ClearingGuard:
    """``optimizer.zero_grad`` calls ``before``, which may raise, and then does what it did."""
    clear = optimizer.zero_grad

    def zero_grad(*args: Any, **kwargs: Any) -> None:
        before()
        clear(*args, **kwargs)

    vars(optimizer)[_NAME] = zero_grad
    return ClearingGuard(optimizer, zero_grad)
