"""The dtypes that a unit computes with, on a model without units: gathered parameters, and what goes in and out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_map_only

from prepkit.live.model.names import named_modules
from prepkit.plan import Plan
from prepkit.steps import InitializeDeepSpeed, ShardUnits, WrapFSDP1

_DEEPSPEED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""What DeepSpeed's JSON calls them."""


def computed(plan: Plan) -> Mapping[str, torch.dtype]:
    """Canonical name to the dtype in which a parameter is computed with, gathered where it is in a unit."""
    found = {layout.name: dtype_of(layout.dtype) for layout in plan.layout}
    for one in plan.steps:
        match one.step:
            case ShardUnits(param_dtype=name, ignored=left) | WrapFSDP1(param_dtype=name, ignored=left) if name:
                whole = {unit.path for unit in one.step.units if unit.full_precision}
                for layout in plan.layout:
                    if not _left_out(layout.name, left):
                        found[layout.name] = torch.float32 if layout.unit in whole else dtype_of(name)
    return found


def _left_out(name: str, ignored: tuple[str, ...]) -> bool:
    """Whether it is named, as for FSDP2, or in a module that is, as for FSDP1."""
    return any(name == one or name.startswith(f"{one}.") for one in ignored)


def cast_as_units(plan: Plan, model: Module) -> None:
    """From here on modules that are units cast what goes in and out, and their buffers, as their wrappers would."""
    modules = named_modules(model)
    for one in plan.steps:
        match one.step:
            case ShardUnits(param_dtype=name, cast_forward_inputs=casts):
                for unit in one.step.units:
                    if name and casts and not unit.full_precision:
                        _cast_inputs(modules[unit.path], dtype_of(name))
                    if unit.output_dtype:
                        _cast_outputs(modules[unit.path], dtype_of(unit.output_dtype))
            case WrapFSDP1(param_dtype=name, cast_forward_inputs=casts, cast_root_forward_inputs=at_root):
                for flat in one.step.units:
                    if name and (casts if flat.path else at_root) and not flat.full_precision:
                        _cast_inputs(modules[flat.path], dtype_of(name))
                if one.step.buffer_dtype:
                    _cast_buffers(model, dtype_of(one.step.buffer_dtype))
            case InitializeDeepSpeed(settings=settings):
                said = {setting.path: json.loads(setting.value) for setting in settings}
                if (short := said.get(("data_types", "buffer_dtype"))) in _DEEPSPEED:
                    _cast_buffers(model, _DEEPSPEED[short])


def _cast_inputs(module: Module, dtype: torch.dtype) -> None:
    def before(_: Module, args: Any, kwargs: Any) -> Any:
        return _cast((args, kwargs), dtype)

    module.register_forward_pre_hook(before, with_kwargs=True)


def _cast_outputs(module: Module, dtype: torch.dtype) -> None:
    module.register_forward_hook(lambda _, __, output: _cast(output, dtype))


def _cast_buffers(model: Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def _cast(given: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, given)


def dtype_of(name: str) -> torch.dtype:
    """Torch's dtype of that name."""
    found: torch.dtype = getattr(torch, name)
    return found
