"""torch ``DistributedDataParallel``."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import attrs
import torch
from torch import nn
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from prepkit.applying.handlers import problems
from prepkit.interpreter import HalfDone, Handler
from prepkit.objects import names
from prepkit.objects.target import Target
from prepkit.ranks import launcher
from prepkit.ranks.world import world
from prepkit.steps import DDPCommHook, WrapDDP


@attrs.frozen
class Wrapped:
    """What a wrapping leaves to its way back."""

    inner: Module
    left: str
    """What cannot be taken back on this rank."""


def wrap_ready(step: WrapDDP, target: Target) -> problems.Problems:
    """The model must be plain, and something in it trainable (DDP-2, DDP-3)."""
    modules, params = names.named_slots(target.model), names.named_parameters(target.model)
    inside = (path for path, module in modules.items() if isinstance(module, DistributedDataParallel))
    fix = "Give the module inside it."
    idle = () if any(param.requires_grad for param in params.values()) else ("model",)
    sent = dict(target.model.named_buffers()) if step.broadcast_buffers else {}
    shared = (name for name, buffer in sent.items() if _overlaps(buffer))
    return (
        *problems.told("ddp.overlapping-buffers", shared, "elements share memory, and DDP writes what rank 0 sends"),
        *problems.told("model.already-wrapped", inside, "in DistributedDataParallel already", fix),
        *problems.sharded(params, "DDP needs whole parameters"),
        *problems.told("model.nothing-trainable", idle, "no parameter requires a gradient, and DDP averages nothing"),
        *(() if step.device is None else launcher.device_problems(step.device.type)),
    )


def _overlaps(buffer: torch.Tensor) -> bool:
    """Whether elements share memory, as those of ``expand``: torch writes into no such tensor."""
    return any(not stride and size > 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))


def _lay_as_usual(model: nn.Module) -> None:
    """Write the strides of dimensions of one element as torch does by itself: the elements stay where they are.

    Where it is sent alone such a buffer is copied onto itself, which torch refuses if these strides differ.
    """
    for buffer in model.buffers():
        if buffer.layout == torch.strided and buffer.is_contiguous() and buffer.stride() != _usual(buffer):
            buffer.data = buffer.data.as_strided(buffer.shape, _usual(buffer))


def _usual(buffer: torch.Tensor) -> tuple[int, ...]:
    return torch.empty(buffer.shape, device="meta").stride()


def can_send_nothing() -> bool:
    """True if this torch's DDP can be told to send no values, from 2.7 on: without that no model on meta is wrapped."""
    return "init_sync" in inspect.signature(nn.parallel.DistributedDataParallel).parameters


def wrap_do(step: WrapDDP, target: Target, *, init_sync: bool = True) -> Wrapped:
    """Collective: compares shapes over the ranks, then broadcasts rank 0's parameters; not without ``init_sync``."""
    inner = target.model
    device = None if step.device is None else launcher.bind(step.device)
    # Newer torch warns whenever it is given broadcast_buffers, also its default.
    buffers: dict[str, Any] = {} if step.broadcast_buffers else {"broadcast_buffers": False}
    sync: dict[str, Any] = {} if init_sync else {"init_sync": False}  # torch 2.6 does not know it
    index = None if device is None or device.type == "cpu" else device.index
    left = _left()
    _lay_as_usual(inner)
    target.together()
    try:
        # Looked up now: MS-AMP puts a class of its own there, without which nobody reduces float8 gradients.
        wrapper = nn.parallel.DistributedDataParallel(
            inner,
            device_ids=None if index is None else [index],
            output_device=index,  # the same one, on every kind of accelerator (DDP-5)
            bucket_cap_mb=step.bucket_cap_mb,
            find_unused_parameters=step.find_unused_parameters,
            gradient_as_bucket_view=step.gradient_as_bucket_view,
            static_graph=step.static_graph,
            **buffers,
            **sync,
        )
        if step.hook is not None:
            wrapper.register_comm_hook(*communication(step.hook))
        target.model = wrapper
        return Wrapped(inner, left)
    except BaseException as error:
        target.model = inner
        if left and isinstance(error, Exception):
            raise HalfDone(f"{error}; {left}") from error
        raise


def communication(asked: DDPCommHook) -> tuple[Any, Any]:
    """State and hook, as ``register_comm_hook`` takes them (H-30). PowerSGD talks over the default group."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # which take 30 ms to import

    hook = getattr(powerSGD_hook if asked.hook == "powerSGD_hook" else default_hooks, asked.hook)
    if asked.wrapper is not None:
        hook = getattr(default_hooks, asked.wrapper)(hook)
    options = asked.options
    return None if options is None else powerSGD_hook.PowerSGDState(None, **attrs.asdict(options)), hook


def _left() -> str:
    """Return what neither a failed wrapping nor the way back can restore: the wrapper sends rank 0's values to all."""
    if world().is_first:
        return ""
    return "parameters and buffers of this rank may hold the values of rank 0, which the wrapper has sent to all"


def wrap_undo(step: WrapDDP, target: Target, memo: Wrapped) -> str:
    """Takes the module out again. On ranks other than 0 its weights stay those of rank 0."""
    del step
    target.model = memo.inner
    return memo.left


WRAP: Handler[WrapDDP, Target, Wrapped] = Handler(ready=wrap_ready, do=wrap_do, undo=wrap_undo)
WITHOUT_VALUES: Handler[WrapDDP, Target, Wrapped] = Handler(
    ready=wrap_ready, do=partial(wrap_do, init_sync=False), undo=wrap_undo
)
"""For a model on meta: torch compares and sends values otherwise, and there are none."""
