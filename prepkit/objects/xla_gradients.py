"""The gradients of a model that every XLA process holds whole: torch_xla averages them when it is told to."""

from __future__ import annotations

from typing import Any

from attrs import define, field
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from prepkit.ranks.world import average_on_xla


@define(eq=False, repr=False)
class XLAGradients:
    """Averages them over all processes, once per step of the optimizer; collective.

    ``Prepared`` calls ``average`` before it clips; in a loop without it the hook before the optimizer's step does.
    """

    optimizer: Optimizer
    fresh: bool = field(default=False, init=False)
    """True if ``average`` has been called since the last step of the optimizer."""
    _hook: RemovableHandle | None = field(default=None, init=False)

    @property
    def watches(self) -> bool:
        """True if it averages before the step of the optimizer."""
        return self._hook is not None

    def watch(self) -> None:
        """From now on the optimizer steps over averages."""
        self._hook = self.optimizer.register_step_pre_hook(self._before_step)

    def unwatch(self) -> None:
        """Lets the optimizer alone again."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def average(self) -> None:
        """All of them, in place; what is averaged already stays the same."""
        groups = self.optimizer.param_groups
        gradients = [param.grad for group in groups for param in group["params"] if param.grad is not None]
        average_on_xla(gradients)
        self.fresh = True

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del optimizer, args, kwargs
        if not self.fresh:
            self.average()
        self.fresh = False
