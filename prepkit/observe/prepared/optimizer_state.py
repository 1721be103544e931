"""An optimizer's state against the parameters that it is of. Reads, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor

from prepkit.objects.local_part import local
from prepkit.observe.fingerprints.tensor import fingerprint

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "sum")
"""State of torch's own optimizers that has the shape of its parameter."""


def _states(optimizer: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    state = getattr(optimizer, "state", None) or {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param in state and isinstance(held := state[param], dict):
                yield param, held


def misfits(optimizer: Any, first: dict[int, str]) -> tuple[str, ...]:
    """Names of parameters whose moments have another shape; of torch's own classes, which are known to share it."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return ()
    return tuple(
        first[id(param)]
        for param, held in _states(optimizer)
        if id(param) in first
        and any(isinstance(held.get(name), Tensor) and held[name].shape != param.shape for name in MOMENTS)
    )


def spoiled(optimizer: Any, first: dict[int, str]) -> tuple[str, ...]:
    """Names of parameters with state that is not finite on this rank."""
    return tuple(
        first[id(param)]
        for param, held in _states(optimizer)
        if id(param) in first and any(map(_is_spoiled, held.values()))
    )


def _is_spoiled(value: Any) -> bool:
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor) or value.device.type == "meta":
        return False
    part = local(value).detach()
    if type(part) is not Tensor or not part.is_floating_point() or part.element_size() < 2 or not part.numel():
        return False  # of eight bits: what its bytes mean is known to its class alone
    return not torch.isfinite(part.sum(dtype=torch.float64)).item()


def alike(optimizer: Any, names: dict[int, str]) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Return what it keeps for the parameters that are named, in numbers that are equal where the state is."""
    return [
        (names[id(param)], [(key, _number(value)) for key, value in sorted(held.items())])
        for param, held in _states(optimizer)
        if id(param) in names and held
    ]


def _number(value: Any) -> Any:
    if isinstance(value, DTensor) or (isinstance(value, Tensor) and type(value) is not Tensor):
        return "a part"
    if isinstance(value, Tensor):
        return fingerprint(value) if value.device.type != "meta" else "meta"
    return value if isinstance(value, bool | int | float | str) else ""
