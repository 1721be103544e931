"""Steps of DeepSpeed's optimizer, and those of the optimizer inside it, which by themselves reach no weight.

The one that was given holds DeepSpeed's flat partitions. Around each of its own steps DeepSpeed fills them with
gradients and copies them into the model; a step beside that changes nothing that anybody sees, and raises nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import define, field
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from prepkit.live.training.loop_order import LoopOutOfOrder

_NAME = "step"


@define(eq=False)
class EngineSteps:
    """Refuses steps of the optimizer inside DeepSpeed's that are none of DeepSpeed's own, until ``remove``."""

    outer: Any
    """DeepSpeed's."""
    allowed: Callable[[], bool]
    """Whether the optimizer inside may step all the same, as while state is read."""
    _inside: bool = field(default=False, init=False)
    _step: Callable[..., Any] = field(init=False)
    """What stands as the ``step`` of DeepSpeed's."""
    _handle: RemovableHandle = field(init=False)

    def __attrs_post_init__(self) -> None:
        does = self.outer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            self._inside = True
            try:
                return does(*args, **kwargs)
            finally:
                self._inside = False

        self._step = vars(self.outer)[_NAME] = step
        self._handle = self.outer.optimizer.register_step_pre_hook(self._before)

    def remove(self) -> None:
        """DeepSpeed's own ``step`` stands there again, unless somebody else has put another one there."""
        self._handle.remove()
        if vars(self.outer).get(_NAME) is self._step:
            del vars(self.outer)[_NAME]

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if self._inside or self.allowed():
            return
        raise LoopOutOfOrder(
            f"the {type(optimizer).__name__} that was given to build_plan was stepped by hand, and under DeepSpeed its "
            "step reaches no weight: write ready.backward(loss) and ready.step() in the place of loss.backward() and "
            "optimizer.step(), or step ready.optimizer in a loop of your own"
        )


def kept_apart(optimizer: Any) -> bool:
    """Whether it is DeepSpeed's, with master weights and an optimizer inside, and not one of torch that steps alone."""
    return not isinstance(optimizer, Optimizer) and isinstance(getattr(optimizer, "optimizer", None), Optimizer)
