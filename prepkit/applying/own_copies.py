"""What ranks must have alike although no plan says it: the values that each shards from its own copy, and modes.

Where every rank shards the copy that it has built, a rank with another seed gives its shards of another model, and
nothing notices: the model is stitched from pieces of two. A sample of every parameter travels as a digest.
"""

from __future__ import annotations

import hashlib
from ctypes import string_at

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from prepkit.objects import names
from prepkit.plan import Plan
from prepkit.steps import InitializeTensors, ReadTensors, SendTensors, ShardUnits, WrapFSDP1

SAMPLED = 64
"""Elements of each parameter that are compared, evenly spaced from the first to the last."""

VALUES = "values"
MODES = "training modes"


def digests(plan: Plan, model: Module) -> tuple[tuple[str, str], ...]:
    """Digests to agree on beside those of plan and model. Reads ``SAMPLED`` elements of each parameter."""
    modes = "".join("01"[site.module.training] for site in names.sites(model))
    return (
        *(((VALUES, sampled(model)),) if shards_own_copies(plan) else ()),
        (MODES, hashlib.sha256(modes.encode()).hexdigest()),
    )


def shards_own_copies(plan: Plan) -> bool:
    """Whether each rank's values come from the model that it has built itself: nobody sends or reads them."""
    steps = [planned.step for planned in plan.steps]
    if any(isinstance(step, ReadTensors | SendTensors | InitializeTensors) for step in steps):
        return False
    return any(
        (isinstance(step, ShardUnits) and not step.already_sharded)
        or (isinstance(step, WrapFSDP1) and not step.sync_module_states)
        for step in steps
    )


def sampled(model: Module) -> str:
    """Digest of a sample of every parameter's elements, bit by bit; of shards that arrive sharded nothing."""
    samples: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for param in names.named_parameters(model).values():
        if not isinstance(param, DTensor) and not param.is_meta and param.numel():
            samples.setdefault((param.device, param.dtype), []).append(_sample(param.detach()))
    digest = hashlib.sha256()
    for (_, dtype), parts in samples.items():
        joint = torch.cat(parts).cpu().contiguous()
        digest.update(str(dtype).encode())
        digest.update(string_at(joint.data_ptr(), joint.nbytes))
    return digest.hexdigest()


def _sample(tensor: Tensor) -> Tensor:
    """Views of it: the first element, and others at even distances up to the last."""
    flat = tensor.reshape(-1)
    if flat.numel() <= SAMPLED:
        return flat
    step = (flat.numel() - 1) // (SAMPLED - 1)
    rest = flat[flat.numel() - 1 - step * (SAMPLED - 2) :: step]
    return torch.cat((flat[:1], rest))
