"""What is on meta gets storage on the device, for a later step to fill; what has values moves there with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module, Parameter

from prepkit.applying.handlers import problems
from prepkit.applying.handlers.named_tensors import named_tensors
from prepkit.interpreter import Handler
from prepkit.objects import names
from prepkit.objects.target import Target
from prepkit.ranks import launcher
from prepkit.steps import AllocateTensors


@frozen(eq=False)
class DevicesBefore:
    """Where everything was."""

    devices: dict[str, torch.device]
    """Name of every tensor to its device."""
    buffers: tuple[tuple[dict[str, Tensor | None], str, Tensor], ...]
    """The dictionary that holds each buffer, its key in it, and the buffer."""


def allocate_ready(step: AllocateTensors, target: Target) -> problems.Problems:
    """The devices must be there."""
    del target
    met = launcher.device_problems(step.device.type)
    return met + (launcher.device_problems(step.buffers.type) if step.buffers else ())


def allocate_do(step: AllocateTensors, target: Target) -> DevicesBefore:
    """Gives every tensor storage on the device and notes in ``target.unfilled`` which have no values yet.

    Buffers that have values keep them, which ``to_empty`` would lose. Returns where things were.
    """
    device = launcher.bind(step.device)
    buffer_device = launcher.bind(step.buffers) if step.buffers else device
    before = DevicesBefore(
        devices={name: tensor.device for name, tensor in named_tensors(target).items()},
        buffers=tuple(
            (site.module._buffers, key, buffer)
            for site in names.sites(target.model)
            for key, buffer in site.module._buffers.items()
            if buffer is not None
        ),
    )
    try:
        target.unfilled |= {name for name, place in before.devices.items() if place.type == "meta"}
        _replace_each(target, lambda tensor: _on(tensor, device if isinstance(tensor, Parameter) else buffer_device))
        return before
    except BaseException:
        allocate_undo(step, target, before)
        raise


def allocate_undo(step: AllocateTensors, target: Target, memo: DevicesBefore) -> None:
    """Puts every tensor back to where it was; what had no values has no storage again."""
    del step
    devices = {id(tensor): memo.devices[name] for name, tensor in named_tensors(target).items()}
    _replace_each(target, lambda tensor: _on(tensor, devices[id(tensor)]))
    for slots, key, buffer in memo.buffers:
        slots[key] = buffer
    target.unfilled -= memo.devices.keys()


def allocate_inside(module: Module, device: torch.device) -> None:
    """Gives storage on the device to what is on meta in a module; each parameter stays the object that it is."""
    for param in module.parameters():
        if param.is_meta:
            swap_content(param, torch.empty_like(param, device=device, requires_grad=False))
    real_of: dict[int, tuple[Tensor, Tensor]] = {}
    for inner in module.modules():
        for key, buffer in inner._buffers.items():
            if buffer is not None and buffer.is_meta:
                made = real_of.setdefault(id(buffer), (buffer, torch.empty_like(buffer, device=device)))
                inner._buffers[key] = made[1]


def swap_content(param: Parameter, data: Tensor) -> None:
    """Puts other data, also on another device, into a parameter that stays the object that it is."""
    attributes = dict(vars(param))
    other = Parameter(data, param.requires_grad)
    torch.utils.swap_tensors(param, other)  # type: ignore[no-untyped-call]  # torch has no types here
    _give_back(param, attributes)


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device: without values where it has none, or where the device holds none."""
    if tensor.is_meta or device.type == "meta":
        return torch.empty_like(tensor, device=device)
    return tensor.to(device)


def _replace_each(target: Target, change: Callable[[Tensor], Tensor]) -> None:
    """``Module._apply``, as ``to`` and ``to_empty`` call it: FSDP2 hooks into it to take over new shards.

    Tensors are swapped in place, so that ties stay tied and an optimizer keeps what it holds.
    """
    changed: dict[int, tuple[Tensor, Tensor]] = {}

    def once(tensor: Tensor) -> Tensor:
        """A buffer that two modules share stays one; a parameter is itself again when it is met a second time."""
        if isinstance(tensor, Parameter):
            return change(tensor)
        return changed.setdefault(id(tensor), (tensor, change(tensor)))[1]

    noted = {param: dict(vars(param)) for param in target.model.parameters()}
    with _swapping():
        target.model._apply(once)  # type: ignore[no-untyped-call]  # torch has no types here
    for param, attributes in noted.items():
        _give_back(param, attributes)


def _give_back(param: Parameter, attributes: dict[str, Any]) -> None:
    """What torch's exchange of contents takes from a parameter: its attributes, and the effect of its hooks.

    The hooks are still in its tables; setting a table anew ties them to the new content.
    """
    vars(param).update(attributes)
    for table in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if hooks := getattr(param, table, None):
            setattr(param, table, hooks)


@contextmanager
def _swapping() -> Iterator[None]:
    """Meanwhile torch exchanges a converted parameter's content, not its ``data``, which cannot leave meta."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    try:
        torch.__future__.set_swap_module_params_on_conversion(True)
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


ALLOCATE: Handler[AllocateTensors, Target, DevicesBefore] = Handler(
    ready=allocate_ready, do=allocate_do, undo=allocate_undo
)
