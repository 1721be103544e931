"""Which prepared model an optimizer belongs to, and what its parameters were before they were wrapped."""

from __future__ import annotations

from typing import Any

from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from prepkit.court import found
from prepkit.findings import Finding
from prepkit.objects import names
from prepkit.objects.joint_optimizer import members

OWNER = "_prepkit_prepared"
"""Attribute of an optimizer: a weak reference to the ``Prepared`` that steps it."""


def parameters_before(model: Module, *, exchanged: bool = False) -> WeakIdKeyDictionary:
    """The parameters that a model has now, to their names; keeps none of them alive.

    None where the plan gives the model its values (``exchanged``): torch exchanges the content of no parameter that
    somebody refers to weakly (``torch.utils.swap_tensors``).
    """
    params = {} if exchanged else names.named_parameters(model)
    return WeakIdKeyDictionary({param: name for name, param in params.items()})


def owner_of(optimizer: Optimizer) -> Any:
    """The ``Prepared`` that steps it; None: nobody's, or its owner is gone."""
    owner = vars(optimizer).get(OWNER)
    return None if owner is None else owner()


def claimed_elsewhere(optimizer: Optimizer | None, model: Module) -> tuple[Finding, ...]:
    """A finding for each optimizer that is stepped together with another model already.

    Each model's ``step`` would step it for both, and gradients of the other are averaged when that one's window ends.
    """
    inner = names.unwrap_root(model)[-1]
    claimed = []
    for index, member in enumerate(members(optimizer)):
        owner = owner_of(member)
        if owner is not None and names.unwrap_root(owner.model)[-1] is not inner:
            kind, other = type(member).__name__, type(names.unwrap_root(owner.model)[-1]).__name__
            what = f"{kind} is stepped with a {other} that was prepared before, and would be stepped by both"
            fix = (
                "give each model an optimizer of its own, or put both into one torch.nn.ModuleDict and prepare that; "
                "ready.close() of the first lets go of it"
            )
            where = f"optimizer[{index}]" if len(members(optimizer)) > 1 else "optimizer"
            claimed.append(found("optimizer.prepared-elsewhere", where, what, fix))
    return tuple(claimed)
