"""Gradients as an optimizer is about to step them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from prepkit.facts.run import GradientFacts, RunFacts
from prepkit.objects.local_part import local
from prepkit.objects.names import Site, first_names, parameters_at
from prepkit.observe.fingerprints.tensor import fingerprint
from prepkit.observe.prepared.optimizers import inner

_COMPARED = frozenset({"ddp", "hook"})
"""What leaves a parameter and its gradient whole on every rank."""


def gradients_at_step(
    facts: RunFacts, places: list[Site], optimizers: list[Any]
) -> tuple[GradientFacts, dict[str, int]] | None:
    """The gradients that these optimizers hold, and fingerprints of those that ranks should hold whole and alike.

    None under DeepSpeed, which keeps gradients where nobody sees them.
    """
    if facts.engine is not None:
        return None
    named = parameters_at(places)
    first = first_names(named)
    known = [inner(one) for one in optimizers]
    held = {id(param) for one in _stepping(known) for group in one.param_groups for param in group["params"]}
    params = {path: p for path, p in named if first[id(p)] == path and id(p) in held and p.requires_grad}
    dense = {path: p.grad for path, p in params.items() if p.grad is not None and not p.grad.is_sparse}
    scaled = any(hasattr(one, "found_inf") for one in known)  # a GradScaler that lets the optimizer skip by itself
    found = GradientFacts(
        stepped=len(params),
        missing=tuple(path for path, param in params.items() if param.grad is None and local(param).numel()),
        spoiled=() if scaled else tuple(path for path, grad in dense.items() if not _finite(grad)),
        zero=bool(dense) and all(_zero(grad) for grad in dense.values()),
    )
    whole = {param.name for param in facts.params if set(param.averaged_by) <= _COMPARED}
    values = {
        path: fingerprint(grad) for path, grad in dense.items() if path in whole and not isinstance(grad, DTensor)
    }
    return found, values


def _stepping(known: list[Any]) -> list[Any]:
    """The first, which is about to step, and of the others those whose gradients are there: a GAN has two turns."""
    return [
        one
        for at, one in enumerate(known)
        if not at or any(param.grad is not None for group in one.param_groups for param in group["params"])
    ]


def _finite(grad: Tensor) -> bool:
    mine = grad._local_tensor if isinstance(grad, DTensor) else grad
    return mine.device.type == "meta" or bool(torch.isfinite(mine).all())


def _zero(grad: Tensor) -> bool:
    return not isinstance(grad, DTensor) and grad.device.type != "meta" and not grad.any()
