"""Parameters divided over the ranks as ``deepspeed.zero.Init`` does, before they have values.

``zero.Init`` as a context divides what is constructed inside it, and given a module it sends each parameter whole from
rank 0 first. A model on meta is constructed already, and there is nothing to send. So its two halves are called here
for one parameter after the other, without the broadcast between them: ``_convert_to_deepspeed_param`` makes it one of
ZeRO-3's, ``partition`` keeps this rank's elements of it and frees the rest. ``deepspeed.initialize`` then finds every
parameter divided, and goes on with the parts.

The ``Init`` stays alive in the parameters: they are gathered as *its* config says. Hence the whole config in the step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module, Parameter

from prepkit.live.handlers import deepspeed, problem_texts
from prepkit.live.handlers.allocate import allocate_inside, swap_content
from prepkit.live.handlers.named_tensors import named_tensors
from prepkit.live.interpreter import Handler
from prepkit.live.model import names, zero3
from prepkit.live.model.deepspeed import forget_groups, without_shared_memory
from prepkit.live.model.target import Target
from prepkit.live.ranks import group_limits, launcher
from prepkit.steps import PartitionParameters


def partition_ready(step: PartitionParameters, target: Target) -> tuple[str, ...]:
    """DeepSpeed must be there and work on the device, and the parameters be plain ones."""
    if problems := deepspeed.missing():
        return problems
    params = names.named_parameters(target.model)
    problems = ()
    if divided := [name for name, param in params.items() if hasattr(param, "ds_id")]:
        problems = (f"{problem_texts.listed(divided)}: divided by deepspeed.zero.Init; build the model outside it",)
    return problems + deepspeed.device_problems(step.device.type, compiles=False)


def partition_do(step: PartitionParameters, target: Target) -> None:
    """Notes in ``target.unfilled`` what has no values yet; all other parameters keep theirs, in parts.

    Raises ``RuntimeError`` with the parameter at which it ended.
    """
    device = launcher.bind(step.device)
    target.together()
    target.unfilled |= {name for name, tensor in named_tensors(target).items() if tensor.is_meta}
    with group_limits.as_default_group(), without_shared_memory(), torch.no_grad():
        init = _init(step)
        for name, param in names.named_parameters(target.model).items():
            _partition(name, param, init, device)
    _move_buffers(target.model, device)


def _init(step: PartitionParameters) -> Any:
    """DeepSpeed's own object, as ``deepspeed.initialize`` would make it, for a module without parameters."""
    from deepspeed import init_distributed
    from deepspeed.runtime.zero.partition_parameters import Init

    forget_groups()
    launcher.name_local_rank()
    init_distributed(dist_init_required=False, verbose=False)
    return Init(module=Module(), config_dict_or_path=deepspeed.config_of(step.settings))


def _partition(name: str, param: Parameter, init: Any, device: torch.device) -> None:
    try:
        _divide(param, init, device)
    except Exception as error:
        raise RuntimeError(f"{name} could not be divided, those before it are: {error}") from error


def _divide(param: Any, init: Any, device: torch.device) -> None:
    """Whole on the device for a moment; what pads the last part is zeros, where DeepSpeed leaves anything."""
    if param.is_meta:
        swap_content(param, torch.empty_like(param, device=device, requires_grad=False))
    else:
        param.data = param.data.to(device)
    init._convert_to_deepspeed_param(param)
    param.partition()
    param.ds_tensor[zero3.held(param).numel() :].zero_()


def _move_buffers(model: Module, device: torch.device) -> None:
    """DeepSpeed leaves them where they are once it finds a parameter divided; one that modules share stays one."""
    allocate_inside(model, device)
    moved: dict[int, tuple[Any, Any]] = {}
    for site in names.sites(model):
        for key, buffer in site.module._buffers.items():
            if buffer is not None:
                site.module._buffers[key] = moved.setdefault(id(buffer), (buffer, buffer.to(device)))[1]


PARTITION: Handler[PartitionParameters, Target, None] = Handler(ready=partition_ready, do=partition_do)
