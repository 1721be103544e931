"""What one library did: a flat table from aspect to value, all plain text and numbers, so that two can be compared."""

from __future__ import annotations

from enum import Enum
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecision
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tests.differential.recorder import Calls, plain

Table = dict[str, Any]


@attrs.frozen(kw_only=True)
class Seen:
    """The outcome of one library on one rank."""

    refused: str = ""
    """Why there is nothing more; empty where it trained."""
    table: Table = attrs.field(factory=dict)


def told(value: Any) -> Any:
    """A value as text that does not depend on where it lies."""
    match value:
        case None | bool() | int() | float():
            return value
        case Enum():
            return value.name
        case torch.dtype() | torch.device():
            return str(value)
        case DeviceMesh():
            return f"mesh {tuple(value.mesh.shape)}"
        case dict():
            return {str(key): told(one) for key, one in sorted(value.items(), key=lambda item: str(item[0]))}
        case list() | tuple():
            return [told(one) for one in value]
        case set() | frozenset():
            return sorted(str(told(one)) for one in value)
        case nn.Module() | Optimizer() | type():
            return value.__name__ if isinstance(value, type) else type(value).__name__
        case _ if callable(value):
            return getattr(value, "__name__", type(value).__name__)
        case _ if hasattr(value, "__dataclass_fields__"):
            return {"": type(value).__name__} | {
                name: told(getattr(value, name)) for name in value.__dataclass_fields__
            }
    return str(value)


def of_calls(calls: Calls) -> Table:
    """A row for each argument of each call; the order of the calls of one function is one more."""
    table: Table = {}
    order: dict[str, list[str]] = {}
    for name, given in calls:
        function, _, place = name.partition("[")
        order.setdefault(function, []).append(place.rstrip("]"))
        for key, value in _flat(name, given):
            table[key] = value
    return _resolved(table) | {f"{function} of": sorted(places) for function, places in order.items()}


OPEN: dict[str, Any] = {
    "fully_shard.ignored_params": [],
    "DistributedDataParallel.bucket_cap_mb": 25,
    "DistributedDataParallel.broadcast_buffers": True,
    "FullyShardedDataParallel.ignored_states": [],
}
"""What torch makes of an argument that is left open."""
BY_ITSELF: dict[str, Any] = {
    "bf16.enabled": False,
    "fp16.enabled": False,
    "zero_optimization.offload_optimizer.device": "none",
    "zero_optimization.offload_optimizer.nvme_path": None,
    "zero_optimization.offload_param.device": "none",
    "zero_optimization.offload_param.nvme_path": None,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
}
"""What DeepSpeed takes where its config says nothing (its ``zero/config.py`` and ``precision_config.py``)."""


def _resolved(table: Table) -> Table:
    """The table with what is left open as torch and DeepSpeed resolve it, in this group of ranks.

    FSDP1's ``auto_wrap_policy`` is left out: the units that it chooses are calls of their own.
    """
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    table = {key: value for key, value in table.items() if not key.endswith(".auto_wrap_policy")}
    for key, value in list(table.items()):
        function, _, rest = key.partition("[")
        place, _, argument = rest.rpartition("].")
        if value is not None:
            continue
        if argument in ("mesh", "device_mesh") and "hard" in function:
            table[key] = f"mesh ({world},)"
        elif (function, argument) == ("fully_shard", "reshard_after_forward"):
            table[key] = bool(place)  # the root is kept, all others are freed
        elif (function, argument) == ("FullyShardedDataParallel", "mixed_precision"):
            del table[key]
            table |= dict(_told_flat(key, told(MixedPrecision())))  # torch ``_init_utils.py``: ``_init_core_state``
        else:
            table[key] = OPEN.get(f"{function}.{argument}", value)
    for key in [key for key in table if key.startswith("CheckpointWrapper[") and key.endswith(".checkpoint_fn")]:
        table.setdefault(f"{key}_kwargs.preserve_rng_state", True)  # torch ``utils/checkpoint.py``
    if "deepspeed.initialize.config.train_batch_size" in table:
        table |= {
            key: value
            for name, value in BY_ITSELF.items()
            if (key := f"deepspeed.initialize.config.{name}") not in table
        }
        table["deepspeed.initialize.dist_init_required"] = bool(table["deepspeed.initialize.dist_init_required"])
    return table


def _flat(name: str, value: Any) -> list[tuple[str, Any]]:
    said = told(value)
    if not isinstance(said, dict):
        return [(name, said)]
    return [row for key, one in said.items() for row in _told_flat(f"{name}.{key}" if key else f"{name}", one)]


def _told_flat(name: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(name, value)]
    return [row for key, one in value.items() for row in _told_flat(f"{name}.{key}" if key else name, one)]


def of_model(model: nn.Module) -> Table:
    """Wrapper classes by path; of each parameter dtype, placement, the shape of what this rank holds."""
    table: Table = {}
    for path, module in model.named_modules():
        kinds = [kind for kind in (_kind(module),) if kind]
        if kinds:
            table.setdefault(f"wrapped[{plain(path)}]", []).extend(kinds)
    for name, param in model.named_parameters(remove_duplicate=False):
        table[f"param[{plain(name)}]"] = _tensor(param) | {"trained": param.requires_grad}
    for name, buffer in model.named_buffers():
        table[f"buffer[{plain(name)}]"] = _tensor(buffer)
    return {row: one for key, value in table.items() for row, one in _told_flat(key, value)}


def _kind(module: nn.Module) -> str:
    if isinstance(module, FSDPModule):
        return "FSDPModule"
    name = type(module).__name__
    return name if name in ("DistributedDataParallel", "FullyShardedDataParallel", "CheckpointWrapper") else ""


def _tensor(tensor: Tensor) -> Table:
    if isinstance(tensor, DTensor):
        placed = [str(placement) for placement in tensor.placements]
        return {"dtype": str(tensor.dtype), "placed": placed, "local": list(tensor.to_local().shape)}
    return {"dtype": str(tensor.dtype), "placed": "plain", "local": list(tensor.shape)}


def of_optimizer(optimizer: Optimizer, model: nn.Module) -> Table:
    """Slots by the name of their parameter: dtype and the shape of what this rank holds; and the groups' options."""
    names = {id(param): plain(name) for name, param in model.named_parameters()}
    table: Table = {"optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        table[f"group[{number}].params"] = sorted(names.get(id(param), "not in the model") for param in group["params"])
        for key, value in group.items():
            if key not in ("params", "initial_lr"):
                table[f"group[{number}].{key}"] = told(value)
    for param, slots in optimizer.state.items():
        for slot, value in slots.items():
            key = f"slot[{names.get(id(param), 'not in the model')}].{slot}"
            table[key] = _tensor(value) if isinstance(value, Tensor) else told(value)
    return {row: one for key, value in table.items() for row, one in _told_flat(key, value)}
