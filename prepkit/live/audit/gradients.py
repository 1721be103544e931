"""Gradients as an optimizer is about to step them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor
from torch.distributed.tensor import DTensor

from prepkit.facts.prepared import GradientFacts, PreparedFacts
from prepkit.live.audit.optimizers import inner
from prepkit.live.fingerprints.tensor import fingerprint
from prepkit.live.model.names import Site, first_names, parameters_at

_COMPARED = frozenset({"ddp", "hook"})
"""What leaves a parameter and its gradient whole on every rank."""


def gradients_at_step(facts: PreparedFacts, places: list[Site], optimizers: list[Any]) -> PreparedFacts:
    """The facts with the gradients that these optimizers hold. Collective where ranks hold whole gradients.

    Nothing is looked at under DeepSpeed, which keeps gradients where nobody sees them.
    """
    if facts.engine is not None:
        return facts
    named = parameters_at(places)
    first = first_names(named)
    held = {id(param) for one in optimizers for group in inner(one).param_groups for param in group["params"]}
    params = {path: p for path, p in named if first[id(p)] == path and id(p) in held and p.requires_grad}
    dense = {path: p.grad for path, p in params.items() if p.grad is not None and not p.grad.is_sparse}
    found = GradientFacts(
        stepped=len(params),
        missing=tuple(path for path, param in params.items() if param.grad is None),
        spoiled=tuple(path for path, grad in dense.items() if not _finite(grad)),
        zero=bool(dense) and all(_zero(grad) for grad in dense.values()),
    )
    return evolve(facts, gradients=_compared(found, facts, dense))


def _finite(grad: Tensor) -> bool:
    mine = grad._local_tensor if isinstance(grad, DTensor) else grad
    return mine.device.type == "meta" or bool(torch.isfinite(mine).all())


def _zero(grad: Tensor) -> bool:
    return not isinstance(grad, DTensor) and grad.device.type != "meta" and not grad.any()


def _compared(found: GradientFacts, facts: PreparedFacts, dense: dict[str, Tensor]) -> GradientFacts:
    """With those that all ranks hold whole: which of them part."""
    if not facts.ranks or len({rank.names for rank in facts.ranks}) > 1:
        return found
    whole = {param.name for param in facts.params if set(param.averaged_by) <= _COMPARED}
    values = {
        path: fingerprint(grad) for path, grad in dense.items() if path in whole and not isinstance(grad, DTensor)
    }
    gathered: list[Any] = [None] * len(facts.ranks)
    dist.all_gather_object(gathered, values)
    common = [path for path in values if all(path in other for other in gathered)]
    parted = tuple(path for path in common if len({other[path] for other in gathered}) > 1)
    return evolve(found, compared=tuple(common), parted=parted)
