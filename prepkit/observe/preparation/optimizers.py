"""Optimizers by the names of the model's own parameters, also where others have taken their places."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from prepkit.facts.preparation import HeldBytes, OptimizerOptions, SteppedGroup
from prepkit.objects import fsdp1_flat
from prepkit.objects.deepspeed import HELD
from prepkit.objects.local_part import local
from prepkit.observe.prepared.optimizers import engines, inner, optimizer_of

Names = dict[int, tuple[str, ...]]
"""``id`` of a parameter to the names of what it holds: its own, or those of all that lie in a flat one."""


def optimizer_options(model: nn.Module, given: list[Any], first: dict[int, str]) -> tuple[OptimizerOptions, ...]:
    """Return what each optimizer steps, and how; of DeepSpeed's own that which it steps with."""
    flat: Names = {}
    for name, part in fsdp1_flat.flat_shards(model).items():
        if not part.original:
            flat[id(part.flat)] = (*flat.get(id(part.flat), ()), name)
    names = {key: (name,) for key, name in first.items()} | flat
    return tuple(_options(model, inner(one), names) for one in given)


def _options(model: nn.Module, optimizer: Any, names: Names) -> OptimizerOptions:
    engine = next((one for one in engines(model) if optimizer_of(one, optimizer)), None)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    if engine is not None:
        groups, optimizer = _of_engine(engine)
    name, module = _computes_as(optimizer)
    return OptimizerOptions(
        name=name,
        module=module,
        groups=tuple(
            SteppedGroup(
                slots=tuple(name for param in params for name in names.get(id(param), (None,))),
                options=tuple((key, value) for key, value in sorted(group.items()) if _is_plain(value)),
            )
            for params, group in zip(groups, optimizer.param_groups, strict=True)
        ),
    )


def _of_engine(engine: Any) -> tuple[list[list[Any]], Any]:
    """The model's parameters by group, and the plain optimizer inside ZeRO's, which holds parts laid end to end."""
    outer = engine.optimizer
    plain = outer if engine.basic_optimizer is None else engine.basic_optimizer
    count = len(plain.param_groups)
    held = next((getattr(outer, name) for name in HELD if hasattr(outer, name)), None)
    if held is None:
        return [list(group["params"]) for group in plain.param_groups], plain
    if len(held) == count:
        return [list(group) for group in held], plain
    if count == 1:  # ZeRO-3 divides a group into several
        return [[param for group in held for param in group]], plain
    return [[None] for _ in range(count)], plain


def _computes_as(optimizer: Any) -> tuple[str, str]:
    """Class and module; of DeepSpeed's Adam for CPUs and its fused one, the class of torch that computes the same."""
    name, module = type(optimizer).__name__, type(optimizer).__module__
    if name in ("DeepSpeedCPUAdam", "FusedAdam") and module.startswith("deepspeed."):
        decoupled = getattr(optimizer, "adam_w_mode", True)
        return ("AdamW" if decoupled else "Adam"), "torch.optim"
    return name, module


def _is_plain(value: Any) -> bool:
    pairs = isinstance(value, tuple) and all(isinstance(one, int | float) or one is None for one in value)
    return value is None or isinstance(value, bool | int | float | str) or pairs


def held_bytes(model: nn.Module, optimizers: list[Any]) -> tuple[HeldBytes, ...]:
    """Bytes that this rank holds now of each kind of tensor, by kind of device; a flat parameter without its views."""
    units = fsdp1_flat.units(model).values()
    flat = [unit._handle.flat_param for unit in units if unit._handle is not None]
    views = {id(view) for one in flat for view in (one, *(one._params or ()))}
    params = [*flat, *(param for param in model.parameters() if id(param) not in views)]
    states = [
        value
        for one in optimizers
        for state in getattr(inner(one), "state", {}).values()
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    kinds: dict[str, list[Any]] = {
        "parameters": params,
        "gradients": [param.grad for param in params if param.grad is not None],
        "buffers": list(model.buffers()),
        "optimizer state": states,
    }
    counted: dict[tuple[Any, str], int] = {}
    for what, tensors in kinds.items():
        for tensor in map(local, (one for one in tensors if not is_lazy(one))):
            key = (what, tensor.device.type)
            counted[key] = counted.get(key, 0) + tensor.numel() * tensor.element_size()
    return tuple(HeldBytes(what=what, device=device, bytes=size) for (what, device), size in counted.items() if size)
