"""The part of a tensor that a rank holds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def local(tensor: Tensor) -> Tensor:
    """The part that this rank holds: of a DTensor its local tensor, else the tensor itself."""
    if isinstance(tensor, DTensor):
        if not torch.is_grad_enabled():  # as in verification, which asks this of every parameter
            return tensor.to_local()
        with torch.no_grad():
            return tensor.to_local()
    part: Tensor = getattr(tensor, "ds_tensor", tensor)  # ZeRO-3: the parameter itself is empty until gathered
    return part


def whole(tensor: Tensor) -> Tensor:
    """All of a DTensor, which its ranks put together: collective there; any other tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.full_tensor()


def summed_part(tensor: Tensor) -> Tensor:
    """As ``local``; of what ranks hold terms of their sum, which is collective there.

    So torch leaves gradients of layers whose input is cut over a sequence, and its optimizers sum them.
    """
    if isinstance(tensor, DTensor) and any(one.is_partial() for one in tensor.placements):
        with torch.no_grad():
            tensor = tensor.redistribute(
                placements=[Replicate() if one.is_partial() else one for one in tensor.placements]
            )
    return local(tensor)


def differs(now: Tensor, before: Tensor) -> Tensor:
    """Whether elements differ, on the device, so that nobody waits for it; NaN is NaN still."""
    before = before.detach().to(now.device, now.dtype)
    return ((now != before) & ~(now.isnan() & before.isnan())).any()
