"""What others do to the optimizers of a run, or to its engine: steps, ``zero_grad`` and loaded states, when they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from attrs import define, field, frozen
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from prepkit.objects.deepspeed import keeps_masters
from prepkit.ranks.world import ranks_of


class Removable(Protocol):
    """A hook that can be taken out again."""

    def remove(self) -> None:
        """Take it out."""
        ...


@frozen(eq=False, repr=False)
class Guard:
    """An object of whose method somebody hears first; torch has no hook for it. Neither pickled nor copied with it."""

    owner: Any
    """An optimizer of torch's or DeepSpeed's, or DeepSpeed's engine."""
    method: str
    guard: Callable[..., Any]
    """What is the method now."""

    def remove(self) -> None:
        """Put the object's own back, unless somebody else has put another one there."""
        if vars(self.owner).get(self.method) is self.guard:
            del vars(self.owner)[self.method]


def guarded(owner: Any, method: str, before: Callable[[], None]) -> Guard:
    """The method calls ``before``, which may raise, and then does what it did."""
    does = getattr(owner, method)

    def guard(*args: Any, **kwargs: Any) -> Any:
        before()
        return does(*args, **kwargs)

    vars(owner)[method] = guard
    return Guard(owner, method, guard)


@define(eq=False, repr=False)
class InnerSteps:
    """Steps of the optimizer inside DeepSpeed's, which by themselves reach no weight, until ``remove``.

    The one that was given holds DeepSpeed's flat partitions. Around each of its own steps DeepSpeed fills them with
    gradients and copies them into the model; a step beside that changes nothing that anybody sees.
    """

    outer: Any
    """DeepSpeed's."""
    beside: Callable[[str], None]
    """Called with the class of the inner optimizer at a step that is not DeepSpeed's own."""
    _inside: bool = field(default=False, init=False)
    _step: Callable[..., Any] = field(init=False)
    """What is the ``step`` of DeepSpeed's now."""
    _handle: RemovableHandle = field(init=False)

    def __attrs_post_init__(self) -> None:
        does = self.outer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            self._inside = True
            try:
                return does(*args, **kwargs)
            finally:
                self._inside = False

        self._step = vars(self.outer)["step"] = step
        self._handle = self.outer.optimizer.register_step_pre_hook(self._before)

    def remove(self) -> None:
        """Put DeepSpeed's own ``step`` back, unless somebody else has put another one there."""
        self._handle.remove()
        if vars(self.outer).get("step") is self._step:
            del vars(self.outer)["step"]

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._inside:
            self.beside(type(optimizer).__name__)


def watched(
    model: Module,
    optimizers: Sequence[Any],
    *,
    engine_steps: bool,
    stepped: Callable[[Optimizer], None],
    inner_stepped: Callable[[str], None],
    engine_stepped: Callable[[], None],
    cleared: Callable[[], None],
    before_state: Callable[..., None],
    before_weights: Callable[..., None],
) -> list[Removable]:
    """Hooks that call back before each step and ``zero_grad``, and refuse states that are whole where it is sharded."""
    hooks: list[Removable] = []
    if not engine_steps:
        hooks += [optimizer.register_step_pre_hook(lambda one, *_: stepped(one)) for optimizer in optimizers]
        hooks += [optimizer.register_load_state_dict_pre_hook(before_state) for optimizer in optimizers]
        hooks.append(model.register_load_state_dict_pre_hook(before_weights))  # type: ignore[no-untyped-call]
    hooks += [InnerSteps(one, inner_stepped) for one in optimizers if keeps_masters(one)]
    clearing = [one for one in optimizers if hasattr(one, "zero_grad")]  # ZeRO-3's may clear nothing
    hooks += [guarded(optimizer, "zero_grad", cleared) for optimizer in clearing]
    return [*hooks, guarded(model, "step", engine_stepped)] if engine_steps else hooks


def averages_nothing(model: Any, optimizer: Optimizer) -> bool:
    """True where averaging is off, as inside a window, at a step that takes the gradients for averages."""
    if isinstance(model, DistributedDataParallel):
        return not model.require_backward_grad_sync and ranks_of(model.process_group).size > 1
    if isinstance(model, FullyShardedDataParallel):
        return not model._sync_gradients
    if isinstance(model, FSDPModule):  # a backward that does not average leaves no gradient in the shards
        return all(param.grad is None for group in optimizer.param_groups for param in group["params"])
    return False
