"""The gradients of parameters that every rank holds whole: beside sharded ones, which no unit reduces, or under DDP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import torch
from attrs import define, field
from torch import Tensor
from torch.autograd import backward
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from prepkit.objects.local_part import local
from prepkit.ranks.world import ranks_of


@define(eq=False, repr=False)
class WholeGradients:
    """Averages them over groups of ranks, one after the other; collective.

    What is averaged already stays the same when it is averaged again, so that neither a window that is looked at twice
    nor gradients that add up on an average do harm.
    """

    params: tuple[Parameter, ...]
    groups: tuple[Any, ...]
    """Process groups, one for each axis of the mesh whose ranks read different data."""
    fresh: bool = field(default=False, init=False)
    """True if ``average`` has been called since the last step of an optimizer."""
    _hook: RemovableHandle | None = field(default=None, init=False)

    @property
    def watches(self) -> bool:
        """True if it averages before the step of any optimizer."""
        return self._hook is not None

    def watch(self) -> None:
        """From now on an optimizer, whichever, also one made later by hand, steps over averages."""
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def unwatch(self) -> None:
        """Lets optimizers alone again."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def average(self) -> None:
        """All of them; called once per window, before anything looks at a gradient."""
        average(self.params, self.groups)
        self.fresh = True

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Averages what this optimizer holds, unless ``average`` was called for this step."""
        del args, kwargs
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        mine = [param for param in self.params if id(param) in held]
        if mine and not self.fresh:
            average(mine, self.groups)
        self.fresh = self.fresh and not mine


def average(params: Sequence[Parameter], groups: Iterable[Any]) -> None:
    """One all-reduce per group of all gradients end to end, in float32 or what is wider.

    A gradient that no rank has stays None, as where one process reads all data; one that some have is 0 on the others.
    """
    flat = _flattened(params)
    for group in groups:
        ranks_of(group).average(flat)
    sizes = [len(params), *(local(param).numel() for param in params)]
    there, *parts = torch.split(flat, sizes)
    missing = [index for index, param in enumerate(params) if param.grad is None]
    nowhere = {index for index in missing if not there[index].item()}  # waits for the device only where one is missing
    for index, (param, part) in enumerate(zip(params, parts, strict=True)):
        if index not in nowhere:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            held = local(param.grad)
            held.copy_(part.view_as(held))


def average_without(params: Sequence[Parameter]) -> None:
    """Give DDP zeros for the gradients that it waits for, so that it averages what other ranks have begun to average.

    What earlier micro-batches have added to these gradients stays. ``params``: of ``averaging.awaited``. It waits for
    the other ranks, where there are any such. Nobody who listens to ``torch.autograd.backward`` hears of it.
    """
    if params:
        backward(params, [torch.zeros_like(param) for param in params])


def _flattened(params: Sequence[Parameter]) -> Tensor:
    """For each gradient 1 where this rank has it, else 0; after them the gradients end to end."""
    dtype = reduce(torch.promote_types, (param.dtype for param in params), torch.float32)
    there = torch.tensor([param.grad is not None for param in params], dtype=dtype, device=local(params[0]).device)
    grads = (torch.zeros_like(param) if param.grad is None else param.grad for param in params)
    return torch.cat((there, *(local(grad).detach().reshape(-1).to(dtype) for grad in grads)))
