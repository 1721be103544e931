"""Whether the ranks draw random numbers of their own where their samples are: equal generators drop equal elements."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from prepkit.plan import Plan


def generator_number(plan: Plan) -> float:
    """The state of the generator that dropout draws from, as a number below 2**24, which float32 holds; 0: not known.

    5 to 20 microseconds, and nothing waits for the device (torch ``get_rng_state``).
    """
    kind = plan.facts.env.device
    if kind == "cpu":
        state: Tensor = torch.get_rng_state()
    else:
        try:
            module = torch.get_device_module(kind)
        except RuntimeError:
            return 0.0
        if not (hasattr(module, "get_rng_state") and module.is_available()):
            return 0.0
        state = module.get_rng_state()
    return float(zlib.crc32(state.cpu().numpy().tobytes()) & 0xFFFFFF)


def read_apart(plan: Plan) -> bool:
    """Whether several ranks with other samples are here; not so in a rehearsal, which plays one of them."""
    return plan.data_parallel_size > 1 and dist.is_initialized() and dist.get_backend() != "fake"


def dropping(model: nn.Module) -> int:
    """How many modules drop elements when they train, and do train: torch's, and attention of transformers'."""
    return sum(module.training and _rate(module) > 0 for module in model.modules())


def _rate(module: Any) -> float:
    """The part of the elements that it drops itself; 0 where it drops none, or has no number for it."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return float(module.p)
    name = "dropout" if isinstance(module, nn.MultiheadAttention | nn.RNNBase) else "attention_dropout"
    rate = getattr(module, name, 0.0)
    return float(rate) if isinstance(rate, int | float) else 0.0
