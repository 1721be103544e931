"""The first step is part of the promise: what the gradients are before the optimizer acts on any of them.

Looked at once, after the first window's backward: every trained parameter has a gradient, all are finite, ranks that
hold the same parameter hold the same gradient, and each lies as its parameter does. Every rank sends one row of a few
numbers per parameter (one all-reduce with MAX over all ranks, and one over the replicas where there are others as
well), so that all of them raise, or none, and nothing has been stepped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from prepkit.findings.text import count, some
from prepkit.live.model import names
from prepkit.live.ranks.agree import wire
from prepkit.live.training.gradients import Gradient
from prepkit.plan.attestation import Check
from prepkit.rules.first_step import MISPLACED, NO_GRADIENT, NOT_FINITE, REPLICAS_DIFFER
from prepkit.rules.rule import Rule

TOLERANCE = 1e-2
"""Relative difference of the largest value of a gradient that reordered sums may make between replicas."""

SUBJECT = "first step"
"""Under which the outcome stands in the attestation."""


class FirstStepRefused(RuntimeError):
    """The first step would have trained wrongly. Raised on every rank before anything was stepped.

    ``checks`` are all that were made; ``rules`` the ids of those that do not hold.
    """

    def __init__(self, problems: Sequence[tuple[Rule, str, str]], checks: tuple[Check, ...]) -> None:
        self.checks = checks
        self.rules = tuple(rule.id for rule, _, _ in problems)
        lines = (f"error {rule.id}: {what}\n  fix: {fix}" for rule, what, fix in problems)
        super().__init__("\n".join(("the first step was not taken, and nothing was changed:", *lines)))


def look(
    model: Module, gradients: Sequence[Gradient], *, scaled: bool, accepted: Sequence[str], reduced: bool = True
) -> tuple[Check, ...]:
    """The checks of the first step. Collective: raises ``FirstStepRefused`` on every rank, or on none.

    ``scaled``: an overflow of float16 is expected, and the scaler's affair. ``accepted`` are the overrides of the plan.
    ``reduced``: replicas hold what is averaged already.
    """
    bad = _everywhere(_flags(gradients, scaled=scaled))
    missing, infinite, misplaced = ([g.name for g, flag in zip(gradients, row, strict=True) if flag] for row in bad)
    unused = isinstance(model, DistributedDataParallel) and model.find_unused_parameters
    stuck = isinstance(model, DistributedDataParallel) and missing and not unused  # so nothing was averaged
    apart = _apart(model, gradients) if reduced and not stuck else []
    rows = (
        (NO_GRADIENT, [] if unused else missing, "every trained parameter has a gradient", "without a gradient"),
        (NOT_FINITE, infinite, "every gradient is finite", "with a gradient that is not finite"),
        (
            MISPLACED,
            misplaced,
            "every gradient lies as its parameter",
            "with a gradient that lies otherwise than they do",
        ),
        (
            REPLICAS_DIFFER,
            apart,
            "replicas hold the same gradient",
            "with gradients that differ over the ranks that replicate them",
        ),
    )
    checks = tuple(
        Check(subject=SUBJECT, what=what, holds=not found, detail=_told(found, problem))
        for _, found, what, problem in rows
    )
    refused = [
        (rule, _told(found, problem), _fix(rule, model))
        for rule, found, _, problem in rows
        if found and (rule.id not in accepted or _binding(rule, model))
    ]
    if refused:
        raise FirstStepRefused(refused, checks)
    return checks


def _told(found: list[str], problem: str) -> str:
    return f"{count(len(found), 'trained parameter')} {problem}: {some(found)}." if found else ""


def _binding(rule: Rule, model: Module) -> bool:
    """Whether nobody may accept it: DDP averages no bucket of which one gradient never comes."""
    return not rule.overridable or (rule is NO_GRADIENT and isinstance(model, DistributedDataParallel))


def _fix(rule: Rule, model: Module) -> str:
    if rule is NO_GRADIENT and isinstance(model, DistributedDataParallel):
        return (
            "Write engine=DDP(find_unused_parameters=True), or freeze them with requires_grad_(False) before "
            "build_plan: DDP waits for their gradients, and averages nothing that shares a bucket with them."
        )
    accept = f" To train on all the same, write overrides=({rule.id!r},)." if rule.overridable else ""
    return f"{rule.fix}{accept}"


def _flags(gradients: Sequence[Gradient], *, scaled: bool) -> Tensor:
    """Three rows of 0 and 1: missing, not finite, misplaced."""
    rows = torch.zeros(3, len(gradients))
    seen = [g.largest for g in gradients if g.largest is not None]
    finite = iter(torch.isfinite(torch.stack(seen)).tolist() if seen else ())
    for index, gradient in enumerate(gradients):
        rows[0, index] = gradient.missing
        rows[1, index] = gradient.largest is not None and not next(finite) and not scaled
        rows[2, index] = gradient.misplaced
    return rows


def _everywhere(rows: Tensor) -> Tensor:
    """What is so on any rank."""
    if not _several(None):
        return rows
    sent = rows.to(wire())
    dist.all_reduce(sent, op=dist.ReduceOp.MAX)
    return sent.cpu()


def _apart(model: Module, gradients: Sequence[Gradient]) -> list[str]:
    """Names of parameters whose gradients differ over the ranks that hold the same of them."""
    found: list[str] = []
    for group, alike in _replicas(model):
        held = [g for g in gradients if alike is None or g.name in alike]
        if not held or not _several(group):
            continue
        zero = torch.zeros(())
        values = torch.stack([(zero if g.largest is None else g.largest.cpu()).nan_to_num(0, 0, 0) for g in held])
        sent = torch.stack((values, -values)).to(wire())
        dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=group)
        most, least = sent[0].cpu(), -sent[1].cpu()
        found += [g.name for g, far in zip(held, (most - least > TOLERANCE * most).tolist(), strict=True) if far]
    return list(dict.fromkeys(found))


def _replicas(model: Module) -> list[tuple[Any, frozenset[str] | None]]:
    """Groups of ranks that replicate parameters, with the parameters they replicate; None: all of them."""
    if isinstance(model, DistributedDataParallel):
        return [(model.process_group, None)]
    if isinstance(model, FullyShardedDataParallel):
        whole = model.sharding_strategy is ShardingStrategy.NO_SHARD
        between = model.process_group if whole else getattr(model, "_inter_node_pg", None)  # the hybrid strategies'
        return [(between, None)] if between is not None else []
    params = {name: param for name, param in names.named_parameters(model).items() if param.requires_grad}
    meshes = [param.device_mesh for param in params.values() if isinstance(param, DTensor)]
    root = next((mesh for mesh in meshes if mesh.ndim == max(m.ndim for m in meshes)), None)
    axes = (root.mesh_dim_names or ()) if root is not None else ()
    return [(root[axis].get_group(), _replicated(params, axis)) for axis in axes if root is not None]


def _replicated(params: dict[str, Any], axis: str) -> frozenset[str]:
    """Parameters of which every rank on the axis holds the same."""
    return frozenset(
        name
        for name, param in params.items()
        if not isinstance(param, DTensor)
        or axis not in (param.device_mesh.mesh_dim_names or ())
        or isinstance(param.placements[(param.device_mesh.mesh_dim_names or ()).index(axis)], Replicate)
    )


def _several(group: Any) -> bool:
    return dist.is_initialized() and dist.get_world_size(group) > 1 and dist.get_backend(group) != "fake"
