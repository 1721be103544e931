"""Optimizers that would train nothing, or out of step with the rest: those that no plan has prepared with the model.

``fully_shard`` and the like put other parameters into the place of a model's own. An optimizer that still holds the old
ones steps tensors that nobody reads, and raises nothing.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from prepkit.applying.claims import OWNER, owner_of
from prepkit.facts.run import RunFacts, StrangerFacts
from prepkit.objects import names
from prepkit.objects.joint_optimizer import held, members
from prepkit.rules.rule import Moment
from prepkit.training.loop import Loop
from prepkit.training.watching import averages_nothing


def own(owner: Any, loop: Loop, before: WeakIdKeyDictionary) -> RemovableHandle:
    """Let ``owner`` step the loop's optimizers, and ask the rules about others over its model, until ``release``.

    Of ``owner`` only the ``model`` is asked, and whether it is still alive.
    ``before`` are the parameters that the model had when it was given (``parameters_before``).
    """
    for optimizer in members(loop.optimizer):
        vars(optimizer)[OWNER] = weakref.ref(owner)
    weak = weakref.ref(loop)
    unrelated: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def look(optimizer: Optimizer, *_: Any) -> None:
        own = weak()  # when it is gone the hook stays, and does nothing: torch goes through the hooks just now
        if own is None or not own.watches or own.acting or optimizer in unrelated or _known(optimizer, own.optimizer):
            return
        seen = _seen(optimizer, own, before)
        if not (seen.replaced or seen.shared):
            unrelated.add(optimizer)
            return
        own.court.ask(Moment.STEP, RunFacts(stranger=seen))

    return register_optimizer_step_pre_hook(look)


def release(owner: Any, optimizers: tuple[Any, ...], watch: RemovableHandle | None) -> None:
    """Let its optimizers be prepared with another model; nothing is refused any more."""
    for optimizer in optimizers:
        if owner_of(optimizer) is owner:
            del vars(optimizer)[OWNER]
    if watch is not None:
        watch.remove()


def _known(optimizer: Optimizer, prepared: Optimizer | None) -> bool:
    return optimizer is prepared or any(optimizer is member for member in members(prepared))


def _seen(optimizer: Optimizer, loop: Loop, before: WeakIdKeyDictionary) -> StrangerFacts:
    """Facts about a step of this optimizer; ``before`` has the names that parameters had before apply."""
    there = {id(param): name for name, param in names.named_parameters(loop.model).items()}
    planned = loop.optimizer is not None
    alone = not planned and averages_nothing(loop.model, optimizer)
    return StrangerFacts(
        name=type(optimizer).__name__,
        replaced=tuple(before[param] for param in held(optimizer) if id(param) not in there and param in before),
        shared=tuple(there[id(param)] for param in held(optimizer) if id(param) in there),
        planned=planned,
        averaged_elsewhere=planned and (loop.state.used or loop.plan.engine_steps),
        engine_steps=loop.plan.engine_steps,
        window=loop.plan.accumulation if alone else 0,
    )
