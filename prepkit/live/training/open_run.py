"""What a closed run no longer does: each rank would do it by itself, without a word."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def while_open(method: Callable[P, T]) -> Callable[P, T]:
    """A method of something that may be ``closed``; then it raises ``RuntimeError``."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        owner: Any = args[0]
        if owner.closed:
            raise RuntimeError(
                f"ready.{method.__name__}() was called after ready.close(), which has let go of the wrapper and the "
                "process group: call it before; to go on, prepare the model anew, with build_plan and apply"
            )
        return method(*args, **kwargs)

    return call
