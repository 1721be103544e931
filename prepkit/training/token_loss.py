"""The mean over all tokens of a window and all ranks, in the place of a mean of means: ``backward(loss, mean_over=n)``.

A loss that is a mean over ``n`` tokens counts as ``n`` of all the window's tokens. How many those are is known at the
window's end alone, so each loss is weighed by ``n`` over a unit that all ranks share, and the gradients are multiplied
once, before anything looks at them or clips them. The unit is a power of two near the usual ``n``: float16 gradients
stay as large as without weights, and nothing is rounded by it, so that a resumed run goes on to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Any

import torch
from attrs import define
from torch import Tensor
from torch.nn import Parameter

from prepkit.objects.local_part import local
from prepkit.plan import Plan
from prepkit.ranks.world import world

Count = float | Tensor
"""How many tokens a mean is over: a number, or a tensor with one."""


@define(eq=False, repr=False)
class TokenWindow:
    """The tokens of the window under way, on this rank."""

    counted: Tensor | None = None
    """Tokens so far, a float32 scalar; None: no loss of this window was weighed."""
    micro_batches: int = 0
    """Losses of this window, weighed or not."""
    unit: Tensor | None = None
    """What counts as weight 1: a power of two, the same on every rank. None: no window had weights yet."""

    def forget(self) -> None:
        """The gradients of this window were thrown away."""
        self.counted, self.micro_batches = None, 0

    def weighed(self, loss: Tensor, mean_over: Count | None) -> Tensor:
        """The loss as backward takes it. Collective at the first weighed loss of all."""
        count = None if mean_over is None else _scalar(mean_over, loss.device)
        self.micro_batches += 1
        if count is None:
            return loss
        if self.unit is None:
            self.unit = _power_of_two(world().total(count) / world().size)
        self.counted = count if self.counted is None else self.counted + count
        return loss * (count / self.unit)

    def end(self, accumulation: int) -> Tensor | None:
        """What the window's gradients are to be multiplied by, a scalar; None: nothing. Collective where weighed.

        They are sums of weighed losses over ``accumulation``, averaged over the ranks. Ranks that read the same count
        in the sum of the tokens as often as among the ranks. A window without a token has gradients of 0 as it is.
        """
        counted, micro_batches = self.counted, max(1, self.micro_batches)
        self.counted, self.micro_batches = None, 0
        if counted is None or self.unit is None:
            return None
        tokens, unit = world().total(counted), self.unit
        some = tokens > 0
        self.unit = torch.where(some, _power_of_two(tokens / (micro_batches * world().size)), unit)
        return torch.where(some, unit * (accumulation * world().size) / tokens, torch.ones_like(tokens))


def weighed_alike(device: torch.device, *, weighs: bool) -> bool:
    """True on every rank where all ranks weigh, or none: else their collectives would differ. Collective."""
    ranks = world()
    if not ranks.carries_data:
        return True
    return not bool(ranks.worst(torch.tensor([weighs, not weighs], dtype=torch.int32, device=device)).all())


def check_number(mean_over: Any) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what is no number of tokens."""
    if isinstance(mean_over, Tensor):
        if mean_over.numel() != 1:
            raise TypeError(f"mean_over has shape {tuple(mean_over.shape)}; give the number, as (labels != -100).sum()")
        return
    what = f"mean_over={mean_over!r:.60} is no number of tokens; write the number that the loss is a mean over"
    if isinstance(mean_over, bool) or not isinstance(mean_over, int | float):
        raise TypeError(what)
    if not isfinite(mean_over) or mean_over < 0:
        raise ValueError(what)


def without_effect(plan: Plan, model: Any) -> str:
    """The reason why gradients could not be multiplied once, at the end of their window; empty: they can."""
    if plan.run.collectives == "xla" and plan.world_size > 1:
        return "mean_over asks torch.distributed for the tokens of all ranks, and torch_xla's processes talk past it"
    if not plan.run.engine_steps or getattr(model, "optimizer", None) is None:
        return ""
    stepped: Any = getattr(model.optimizer, "optimizer", model.optimizer)
    if type(stepped).__name__ != "MuonWithAuxAdam":
        return ""
    return "DeepSpeed's Muon makes its update before gradients are divided, so that mean_over would have no effect"


def _scalar(mean_over: Count, device: torch.device) -> Tensor:
    if isinstance(mean_over, Tensor):
        return mean_over.detach().reshape(()).to(device, torch.float32, non_blocking=True, copy=True)
    return torch.tensor(float(mean_over), dtype=torch.float32, device=device)


def _power_of_two(mean: Tensor) -> Tensor:
    """The largest that is at most the mean; 1 for less."""
    at_least_one = mean.clamp(min=1.0)
    mantissa, _ = torch.frexp(at_least_one)
    return at_least_one / (mantissa * 2)


def multiply_gradients(params: Iterable[Parameter], factor: Tensor) -> None:
    """Multiplies this rank's part of each gradient, in place."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for param in params:
        if param.grad is not None:
            grad = local(param.grad)
            by_device.setdefault(grad.device, []).append(grad._values() if grad.is_sparse else grad)
    for device, grads in by_device.items():
        torch._foreach_mul_(grads, factor.to(device))


@contextmanager
def multiplied_by_engine(engine: Any, factor: Tensor | None) -> Iterator[None]:
    """Inside, a DeepSpeed engine's step takes its gradients times the factor, before it takes their norm and clips.

    ZeRO and its float16 optimizers divide by their loss scale there (``unscale_and_clip_grads``), so that scale is
    another one for the time of the step. Its bfloat16 optimizer keeps float32 gradients of its own; without any of
    these gradients lie where torch has them.
    """
    optimizer = engine.optimizer
    own = getattr(optimizer, "fp32_groups_gradients_flat", None)
    if factor is None:
        yield
    elif own is not None:
        torch._foreach_mul_(list(own), factor.to(own[0].device))
        yield
    elif hasattr(optimizer, "loss_scale_config"):
        with _divided_by(optimizer.loss_scale_config, "cur_scale", float(factor)):
            yield
    elif hasattr(optimizer, "loss_scale"):
        with _divided_by(optimizer, "loss_scale", float(factor)):
            yield
    else:
        multiply_gradients(engine.module.parameters(), factor)
        yield


@contextmanager
def _divided_by(holder: Any, name: str, factor: float) -> Iterator[None]:
    """Inside, the number is that much smaller. What changes it meanwhile, such as an overflow, multiplies it after."""
    before = getattr(holder, name)
    meanwhile = before / factor
    setattr(holder, name, meanwhile)
    try:
        yield
    finally:
        after = getattr(holder, name)
        setattr(holder, name, before if after == meanwhile else before * (after / meanwhile))
