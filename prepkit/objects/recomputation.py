"""The function of a checkpointed module, and the operators that it keeps: written by wrapping, read by observing."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint


def offloaded(function: Any, *args: Any, **kwargs: Any) -> Any:
    """``checkpoint`` whose inputs wait on the host: it saves them as an operator would, for hooks to take (K-F18).

    Below it the hooks of ``checkpoint`` itself take over, so that neither weights nor what is recomputed is copied.
    """
    with save_on_cpu(pin_memory=True):  # pinned where torch sees CUDA, else plain
        return checkpoint(function, *args, use_reentrant=False, **kwargs)


def overloads(name: str) -> tuple[OpOverload, ...]:
    """The operators of a dotted name: all overloads of ``aten.mm``, the one of ``aten.mm.default``; none: unknown."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, OpOverloadPacket):
        return tuple(getattr(found, overload) for overload in found.overloads())  # type: ignore[no-untyped-call]
    return (found,) if isinstance(found, OpOverload) else ()
