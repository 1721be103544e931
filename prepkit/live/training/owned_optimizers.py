"""Optimizers that would train nothing, or out of step with the rest: those that no plan has prepared with the model.

``fully_shard`` and the like put other parameters into the place of a model's own. An optimizer that still holds the old
ones steps tensors that nobody reads, and raises nothing.
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from prepkit.findings import Finding, Severity
from prepkit.findings.text import count, some
from prepkit.live.model import names
from prepkit.live.model.joint_optimizer import members
from prepkit.live.training.loop_order import LoopOutOfOrder
from prepkit.live.training.own_loop import averages_nothing

if TYPE_CHECKING:
    from prepkit.live.training.loop_view import LoopView

OWNER = "_prepkit_prepared"
"""Attribute of an optimizer: a weak reference to the ``Prepared`` that steps it."""


def parameters_before(model: Module, *, exchanged: bool = False) -> WeakIdKeyDictionary:
    """The parameters that a model has now, to their names; keeps none of them alive.

    None where the plan gives the model its values (``exchanged``): torch exchanges the content of no parameter that
    somebody refers to weakly (``torch.utils.swap_tensors``).
    """
    params = {} if exchanged else names.named_parameters(model)
    return WeakIdKeyDictionary({param: name for name, param in params.items()})


def own(prepared: LoopView, before: WeakIdKeyDictionary) -> None:
    """From now on ``prepared`` steps its optimizers, and others over its model are refused, until it is closed or gone.

    ``before`` are the parameters that the model had when it was given (``parameters_before``).
    """
    for optimizer in prepared.optimizers:
        vars(optimizer)[OWNER] = weakref.ref(prepared)
    prepared._watch = _watched(prepared, before)


def release(prepared: LoopView) -> None:
    """Its optimizers may be prepared with another model, and nothing is refused any more."""
    for optimizer in prepared.optimizers:
        if vars(optimizer).get(OWNER, _nobody)() is prepared:
            del vars(optimizer)[OWNER]
    if prepared._watch is not None:
        prepared._watch.remove()


def _nobody() -> None:
    """Stands where no reference is."""


def claimed_elsewhere(optimizer: Optimizer | None, model: Module) -> tuple[Finding, ...]:
    """A finding for each optimizer that is stepped together with another model already.

    Each model's ``step`` would step it for both, and gradients of the other are averaged when that one's window ends.
    """
    inner = names.unwrap_root(model)[-1]
    found = []
    for index, member in enumerate(members(optimizer)):
        owner = vars(member).get(OWNER, _nobody)()
        if owner is not None and names.unwrap_root(owner.model)[-1] is not inner:
            kind, other = type(member).__name__, type(names.unwrap_root(owner.model)[-1]).__name__
            what = f"{kind} is stepped with a {other} that was prepared before, and would be stepped by both"
            fix = (
                "give each model an optimizer of its own, or put both into one torch.nn.ModuleDict and prepare that; "
                "ready.close() of the first lets go of it"
            )
            where = f"optimizer[{index}]" if len(members(optimizer)) > 1 else "optimizer"
            found.append(
                Finding(rule="optimizer.prepared-elsewhere", severity=Severity.ERROR, where=where, what=what, fix=fix)
            )
    return tuple(found)


def _watched(prepared: LoopView, before: WeakIdKeyDictionary) -> RemovableHandle:
    """Before any optimizer of this process steps: refuses one that the plan does not know and that would go wrong."""
    owner = weakref.ref(prepared)
    unrelated: weakref.WeakSet[Optimizer] = weakref.WeakSet()
    told: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def look(optimizer: Optimizer, *_: Any) -> None:
        ready = owner()  # when it is gone the hook stays, and does nothing: torch goes through the hooks just now
        if ready is None or optimizer in unrelated or _known(optimizer, ready.optimizer):
            return
        if _refuse(optimizer, ready, before, told):
            unrelated.add(optimizer)

    return register_optimizer_step_pre_hook(look)


def _known(optimizer: Optimizer, prepared: Optimizer | None) -> bool:
    return optimizer is prepared or any(optimizer is member for member in members(prepared))


def _averages_for_step(ready: LoopView) -> bool:
    """Whether gradients are divided, averaged and cleared for ``ready.step()``, so that no other may use them.

    DeepSpeed takes them away as they come.
    """
    return ready.optimizer is not None and (ready.in_use or ready.engine_steps)


def _refuse(
    optimizer: Optimizer, ready: LoopView, before: WeakIdKeyDictionary, told: weakref.WeakSet[Optimizer]
) -> bool:
    """Raises ``RuntimeError``, or says whether it has nothing to do with the model, now and later."""
    held = [param for group in optimizer.param_groups for param in group["params"]]
    standing = {id(param): name for name, param in names.named_parameters(ready.model).items()}
    lost = [before[param] for param in held if id(param) not in standing and param in before]
    both = [standing[id(param)] for param in held if id(param) in standing]
    kind, fix = type(optimizer).__name__, "give it to build_plan with the other: optimizer=[first, second]"
    if lost:
        raise RuntimeError(
            f"this {kind} holds {count(len(lost), 'parameter')} that apply has replaced in the model, so it would "
            f"train nothing: {some(lost)}; {fix}"
        )
    if both and _averages_for_step(ready):
        fix_here = "give it to build_plan in the place of the other" if ready.engine_steps else fix
        raise RuntimeError(
            f"this {kind} holds {count(len(both), 'parameter')} of a prepared model, and the plan does not know it: "
            f"{some(both)}; {fix_here}, and ready.step() steps {'it' if ready.engine_steps else 'both'}"
        )
    if both and ready.optimizer is None and averages_nothing(ready.model, optimizer):
        raise LoopOutOfOrder(
            f"this {kind} was stepped inside a window of {ready.plan.owners.accumulation_steps} micro-batches, and no "
            "gradient of this rank has been averaged with those of the others: the plan knows no optimizer, so that "
            "nothing ends its windows. Give it to build_plan, or write Config(accumulation=1)"
        )
    if both and ready.optimizer is not None and optimizer not in told:
        told.add(optimizer)
        warnings.warn(
            f"this {kind} holds {count(len(both), 'parameter')} of a prepared model, and the plan knows another: what "
            f"ready.save() writes is the state of that one; {fix}, or give this one alone",
            stacklevel=4,
        )
    return not both
