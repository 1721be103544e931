"""A stretch of code in which no other rank is asked, as they do something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from prepkit.ranks.world import world


class NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, a collective over more ranks than this one raises what ``refuses`` makes of its name."""

    def __init__(self, refuses: Callable[[str], Exception]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refuses = refuses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch."""
        del types
        if func.namespace in ("c10d", "_c10d_functional") and world().size > 1:
            raise self.refuses(func.name())
        return func(*args, **(kwargs or {}))
