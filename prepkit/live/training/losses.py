"""What ``ready.backward`` takes as a loss."""

from __future__ import annotations

from typing import Any

import torch

from prepkit.live.training.loop_order import LoopOutOfOrder


def check_loss(loss: Any) -> None:
    """Raises ``TypeError``, ``ValueError`` or ``LoopOutOfOrder`` for what no backward can begin with."""
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"ready.backward() takes the loss as a tensor, and this is {type(loss).__name__}; give it what the model "
            "computed, such as output.loss, and call .item() behind it"
        )
    if loss.numel() != 1:
        shape = tuple(loss.shape)
        raise ValueError(f"ready.backward() takes one number, and this loss has the shape {shape}; write loss.mean()")
    if not loss.requires_grad:
        raise LoopOutOfOrder(
            "no gradient leads from this loss to the model: it was detached, or computed under torch.no_grad() or from "
            "frozen parameters alone. Give ready.backward() what ready.model(...) has led to"
        )
