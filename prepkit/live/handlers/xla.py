"""XLA devices, through torch_xla, which is imported when a step needs it."""

from __future__ import annotations

from typing import Any

import torch
from attrs import field, frozen
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from prepkit.live.handlers.swap_layers import library_problems
from prepkit.live.interpreter import Handler
from prepkit.live.model import names
from prepkit.live.model.target import Target
from prepkit.steps import MoveToXLA, ReduceXLAGradients


@frozen
class Lay:
    """One tensor of one module before the move: the object, and what it held."""

    module: Module = field(repr=False)
    name: str
    tensor: torch.Tensor = field(repr=False)
    data: torch.Tensor = field(repr=False)


def move_ready(step: MoveToXLA, target: Target) -> tuple[str, ...]:
    """torch_xla must be there, and the optimizer's parameters where the model's are (PR-6, which never looked)."""
    del step
    found = library_problems("torch_xla", "torch_xla")
    held = names.named_parameters(target.model)
    if empty := [name for name, param in held.items() if param.is_meta]:
        found += (f"{empty[0]} is on meta, without data to move; load the weights first",)
    here = sorted({str(param.device) for param in held.values()})
    groups = target.optimizer.param_groups if target.optimizer else []
    there = sorted({str(param.device) for group in groups for param in group["params"]})
    if away := [device for device in there if device not in here]:
        apart = f"the optimizer holds parameters on {', '.join(away)}, the model's are on {', '.join(here)}"
        found += (f"{apart}; build the optimizer from model.parameters() after the last move",)
    return found


def move_do(step: MoveToXLA, target: Target) -> tuple[Lay, ...]:
    """Moves the model; its parameters may be other objects afterwards, of the same names (PR-11)."""
    import torch_xla.core.xla_model as xm

    before = tuple(
        Lay(module, name, tensor, tensor.data)
        for module in target.model.modules()
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None
    )
    device = xm.xla_device()
    try:
        if step.forked:
            import torch_xla.distributed.xla_multiprocessing as xmp

            target.model = xmp.MpModelWrapper(target.model).to(device)
        else:
            target.model.to(device)
        return before
    except BaseException:
        move_undo(step, target, before)
        raise


def move_undo(step: MoveToXLA, target: Target, memo: tuple[Lay, ...]) -> None:
    """Puts every tensor back, as the object that it was and with what it held."""
    del step, target
    for lay in memo:
        lay.tensor.data = lay.data
        held: dict[str, Any] = lay.module._parameters if isinstance(lay.tensor, Parameter) else lay.module._buffers
        held[lay.name] = lay.tensor


MOVE: Handler[MoveToXLA, Target, tuple[Lay, ...]] = Handler(ready=move_ready, do=move_do, undo=move_undo)


def reduce_ready(step: ReduceXLAGradients, target: Target) -> tuple[str, ...]:
    """torch_xla must be there. An optimizer may still be created by a step before this one."""
    del step, target
    return library_problems("torch_xla", "torch_xla")


def reduce_do(step: ReduceXLAGradients, target: Target) -> RemovableHandle:
    """A hook before ``optimizer.step``: sums all gradients over the processes, divided by their number (W-5)."""
    del step
    if target.optimizer is None:
        raise RuntimeError("there is no optimizer to watch; its gradients would stay each process's own")
    return target.optimizer.register_step_pre_hook(average)


def average(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Averages the gradients of the optimizer's parameters in place."""
    del args, kwargs
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    xm.all_reduce("sum", gradients, scale=1.0 / xr.world_size())


def reduce_undo(step: ReduceXLAGradients, target: Target, memo: RemovableHandle) -> None:
    """Takes the hook away."""
    del step, target
    memo.remove()


REDUCE: Handler[ReduceXLAGradients, Target, RemovableHandle] = Handler(
    ready=reduce_ready, do=reduce_do, undo=reduce_undo
)
