"""XLA devices, through torch_xla, which is imported when a step needs it."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch.nn import Module, Parameter

from prepkit.applying.handlers import problems
from prepkit.applying.handlers.swap_layers import library_problems
from prepkit.findings import RunRefused
from prepkit.interpreter import Handler
from prepkit.objects import names
from prepkit.objects.target import Target
from prepkit.objects.xla_gradients import XLAGradients
from prepkit.steps import MoveToXLA, ReduceXLAGradients


@frozen(repr=False)
class Placed:
    """One tensor of one module before the move: the object, and what it held."""

    module: Module
    name: str
    tensor: torch.Tensor
    data: torch.Tensor


def move_ready(step: MoveToXLA, target: Target) -> problems.Problems:
    """torch_xla must be there, and the optimizer's parameters where the model's are (PR-6, which never looked)."""
    del step
    params = names.named_parameters(target.model)
    devices = sorted({str(param.device) for param in params.values()})
    groups = target.optimizer.param_groups if target.optimizer else []
    optimizer_devices = sorted({str(param.device) for group in groups for param in group["params"]})
    elsewhere = [device for device in optimizer_devices if device not in devices]
    what = f"holds parameters on {', '.join(elsewhere)}, the model's are on {', '.join(devices)}"
    fix = "Build the optimizer from model.parameters() after the last move."
    return (
        *library_problems("torch_xla", "torch_xla", "xla.library-missing"),
        *problems.on_meta(params),
        *problems.told("optimizer.foreign-parameters", ["optimizer"] if elsewhere else [], what, fix),
    )


def move_do(step: MoveToXLA, target: Target) -> tuple[Placed, ...]:
    """Moves the model; its parameters may be other objects afterwards, of the same names (PR-11)."""
    import torch_xla.core.xla_model as xm

    before = tuple(
        Placed(module, name, tensor, tensor.data)
        for module in target.model.modules()
        for slots in (module._parameters, module._buffers)
        for name, tensor in slots.items()
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


def move_undo(step: MoveToXLA, target: Target, memo: tuple[Placed, ...]) -> None:
    """Puts every tensor back, as the object that it was and with what it held."""
    del step, target
    for place in memo:
        place.tensor.data = place.data
        slots: dict[str, Any] = (
            place.module._parameters if isinstance(place.tensor, Parameter) else place.module._buffers
        )
        slots[place.name] = place.tensor


MOVE: Handler[MoveToXLA, Target, tuple[Placed, ...]] = Handler(ready=move_ready, do=move_do, undo=move_undo)


def reduce_ready(step: ReduceXLAGradients, target: Target) -> problems.Problems:
    """torch_xla must be there. An optimizer may still be created by a step before this one."""
    del step, target
    return library_problems("torch_xla", "torch_xla", "xla.library-missing")


def reduce_do(step: ReduceXLAGradients, target: Target) -> XLAGradients:
    """Sums all gradients over the processes, divided by their number (W-5): before they are clipped, or the step."""
    del step
    if target.optimizer is None:
        raise RunRefused(problems.no_optimizer(target))
    gradients = XLAGradients(optimizer=target.optimizer)
    gradients.watch()
    target.whole_gradients = gradients
    return gradients


def reduce_undo(step: ReduceXLAGradients, target: Target, memo: XLAGradients) -> None:
    """Takes the hook away."""
    del step
    target.whole_gradients = None
    memo.unwatch()


REDUCE: Handler[ReduceXLAGradients, Target, XLAGradients] = Handler(ready=reduce_ready, do=reduce_do, undo=reduce_undo)
