"""Everything that a plan could change, as values that can be compared: nothing may differ after a clean halt."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from prepkit.objects.target import Target
from tests.support.fragile_model import TOKENS

HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))


def snapshot(target: Target) -> dict[str, Any]:
    """Name of what was looked at to what was seen. Objects count by identity, tensors by identity and bytes."""
    model, optimizer = target.model, target.optimizer
    return {
        "model": id(model),
        "modules": [(path, id(module), type(module)) for path, module in model.named_modules()],
        "attributes": [(path, sorted(vars(module))) for path, module in model.named_modules()],
        "training": [module.training for module in model.modules()],
        "hooks": [(path, name, _hooks(module, name)) for path, module in model.named_modules() for name in HOOKS],
        "compiled": [id(module._compiled_call_impl) for module in model.modules()],
        "parameters": [
            (name, id(p), p.requires_grad, _bytes(p), _bytes(p.grad)) for name, p in model.named_parameters()
        ],
        "state dict": [(name, _bytes(tensor)) for name, tensor in model.state_dict().items()],
        "buffers": [(name, id(buffer), _bytes(buffer)) for name, buffer in model.named_buffers()],
        "forward": _bytes(_forward(model)),
        "optimizer": None if optimizer is None else _optimizer(optimizer),
        "scheduler": (id(target.scheduler), getattr(target.scheduler, "last_epoch", None)),
        "loaders": [(id(loader), id(loader.sampler)) for loader in target.loaders],
        "released": sorted(target.released),
        "mesh": target.mesh,
        "environment": dict(os.environ),
        "flags": _flags(),
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what is not as it was."""
    return [name for name, value in before.items() if after[name] != value]


def _forward(model: nn.Module) -> Tensor | None:
    """Over copies of the buffers: a batch norm in training counts its calls. None of a model without values."""
    if any(param.is_meta for param in model.parameters()):
        return None
    copies = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        output: Tensor = torch.func.functional_call(model, copies, (TOKENS,))
    return output


def _bytes(tensor: Tensor | None) -> tuple[str, str, tuple[int, ...], bytes] | None:
    if tensor is None:
        return None
    if tensor.is_meta:
        return str(tensor.dtype), "meta", tuple(tensor.shape), b""
    held = tensor.detach().contiguous().reshape(-1)
    data = ctypes.string_at(held.data_ptr(), held.numel() * held.element_size())
    return str(tensor.dtype), str(tensor.device), tuple(tensor.shape), data


def _hooks(module: nn.Module, name: str) -> list[int]:
    return [id(hook) for hook in getattr(module, name).values()]


def _optimizer(optimizer: torch.optim.Optimizer) -> Any:
    groups = [
        ([id(p) for p in group["params"]], {name: value for name, value in group.items() if name != "params"})
        for group in optimizer.param_groups
    ]
    state = [
        (id(param), {key: _bytes(value) if isinstance(value, Tensor) else value for key, value in held.items()})
        for param, held in optimizer.state.items()
    ]
    return id(optimizer), groups, sorted(state, key=lambda pair: pair[0])


def _flags() -> dict[str, Any]:
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.enabled),
        "threads": torch.get_num_threads(),
        "swap": torch.__future__.get_swap_module_params_on_conversion(),
        "random": _bytes(torch.get_rng_state()),
        "anomaly": torch.is_anomaly_enabled(),
        "group": dist.is_initialized(),
    }
