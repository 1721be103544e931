"""The part of a tensor that a rank holds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


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


def part_of_gradient(param: Tensor, grad: Tensor) -> Tensor:
    """Of a gradient what belongs to the part of the parameter that this rank holds.

    Collective where torch has left it in another layout, as sums of which each rank has a term where the input of a
    layer is cut over a sequence: its optimizers put that together as well.
    """
    if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad.placements != param.placements:
        with torch.no_grad():
            return grad.redistribute(placements=param.placements).to_local()
    return local(grad)


def differs(now: Tensor, before: Tensor) -> Tensor:
    """Whether elements differ, on the device, so that nobody waits for it; NaN is NaN still."""
    before = before.detach().to(now.device, now.dtype)
    return ((now != before) & ~(now.isnan() & before.isnan())).any()
