"""What torch does to a plain module, in place: move, lay in order, upcast, autocast."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from attrs import frozen
from torch.distributed.tensor import DTensor
from torch.nn import Module

from prepkit.applying.handlers import problems
from prepkit.applying.handlers.optimizer_state import state_of
from prepkit.interpreter import Handler
from prepkit.objects import names
from prepkit.objects.forward import MARK, AutocastedForward
from prepkit.objects.target import Target
from prepkit.ranks import launcher
from prepkit.steps import (
    AutocastForward,
    MakeContiguous,
    MoveModel,
    UpcastParameters,
)

# --- move ----------------------------------------------------------------------------------------------------------


def move_ready(step: MoveModel, target: Target) -> problems.Problems:
    """The device must be there, and every tensor must have data to move."""
    met = launcher.device_problems(step.device.type)
    return met + (() if step.device.type == "meta" else problems.on_meta(_tensors(target.model)))


def move_do(step: MoveModel, target: Target) -> dict[str, torch.device]:
    """Moves in place: parameters stay the same objects, so an optimizer keeps them. Returns where things were."""
    device = launcher.bind(step.device)
    before = {name: tensor.device for name, tensor in _tensors(target.model).items() if tensor.device != device}
    try:
        if any(isinstance(param, DTensor) for param in target.model.parameters()):
            _put_back(target.model, dict.fromkeys(before, device))  # to() makes DTensors anew, without their hooks
        else:
            target.model.to(device)
        return before
    except BaseException:
        _put_back(target.model, before)
        raise


def move_undo(step: MoveModel, target: Target, memo: dict[str, torch.device]) -> None:
    """Moves each tensor to where it was."""
    del step
    _put_back(target.model, memo)


def _tensors(model: Module) -> dict[str, torch.Tensor]:
    return dict(chain[tuple[str, torch.Tensor]](model.named_parameters(), model.named_buffers()))


def _put_back(model: Module, devices: dict[str, torch.device]) -> None:
    tensors = _tensors(model)
    for name, device in devices.items():
        tensor = tensors[name]
        tensor.data = tensor.data.to(device)
        if tensor.grad is not None:
            tensor.grad.data = tensor.grad.data.to(device)


MOVE: Handler[MoveModel, Target, dict[str, torch.device]] = Handler(ready=move_ready, do=move_do, undo=move_undo)

# --- lay in order --------------------------------------------------------------------------------------------------


def contiguous_ready(step: MakeContiguous, target: Target) -> problems.Problems:
    """Every name must be a parameter, without a gradient in the old order."""
    params = names.named_parameters(target.model)
    return problems.absent("parameter", step.names, params) + problems.with_gradient(step.names, params)


def contiguous_do(step: MakeContiguous, target: Target) -> dict[str, torch.Tensor]:
    """Copies the values; returns what each parameter held."""
    params = names.named_parameters(target.model)
    before = {name: params[name].data for name in step.names}
    for name in step.names:
        params[name].data = before[name].contiguous()
    return before


def contiguous_undo(step: MakeContiguous, target: Target, memo: dict[str, torch.Tensor]) -> None:
    """Gives each parameter what it held."""
    del step
    params = names.named_parameters(target.model)
    for name, data in memo.items():
        params[name].data = data


CONTIGUOUS: Handler[MakeContiguous, Target, dict[str, torch.Tensor]] = Handler(
    ready=contiguous_ready, do=contiguous_do, undo=contiguous_undo
)

# --- upcast --------------------------------------------------------------------------------------------------------


@frozen
class Narrow:
    """What one parameter was before its upcast."""

    name: str
    dtype: torch.dtype
    state: tuple[str, ...]
    """Keys of the optimizer state that followed it."""


def upcast_ready(step: UpcastParameters, target: Target) -> problems.Problems:
    """Every name must be a parameter that the dtype can hold exactly, or the way back would not be exact either."""
    params, dtype = names.named_parameters(target.model), getattr(torch, step.dtype)
    wide = [n for n in step.names if n in params and torch.promote_types(params[n].dtype, dtype) != dtype]
    widest = params[wide[0]].dtype if wide else None
    return (
        *problems.absent("parameter", step.names, params),
        *problems.with_gradient(step.names, params),
        *problems.told("plan.other-model", wide, f"{widest} does not fit into {step.dtype}"),
    )


def upcast_do(step: UpcastParameters, target: Target) -> tuple[Narrow, ...]:
    """Casts parameters, each the same object, and the optimizer state that had their dtype.

    AdamW would fail on a bfloat16 moment of a float32 parameter (torch ``lerp_``).
    """
    dtype, params = getattr(torch, step.dtype), names.named_parameters(target.model)
    before: list[Narrow] = []
    try:
        for name in step.names:
            param, state = params[name], state_of(target, name, params[name])
            keys = tuple(
                key
                for key, value in state.items()
                if isinstance(value, torch.Tensor) and value.shape == param.shape and value.dtype == param.dtype
            )
            before.append(Narrow(name, param.dtype, keys))
            _cast(param, state, keys, dtype)
        return tuple(before)
    except BaseException:
        upcast_undo(step, target, tuple(before))
        raise


def upcast_undo(step: UpcastParameters, target: Target, memo: tuple[Narrow, ...]) -> None:
    """Casts back; exact, because every 16-bit value survives the way to a wider dtype."""
    del step
    params = names.named_parameters(target.model)
    for narrow in memo:
        param = params[narrow.name]
        _cast(param, state_of(target, narrow.name, param), narrow.state, narrow.dtype)


def _cast(param: torch.nn.Parameter, state: dict[str, Any], keys: tuple[str, ...], dtype: torch.dtype) -> None:
    for key in keys:
        state[key] = state[key].to(dtype)
    param.data = param.data.to(dtype)


UPCAST: Handler[UpcastParameters, Target, tuple[Narrow, ...]] = Handler(
    ready=upcast_ready, do=upcast_do, undo=upcast_undo
)

# --- autocast ------------------------------------------------------------------------------------------------------


def autocast_ready(step: AutocastForward, target: Target) -> problems.Problems:
    """A second layer would cast twice (G-20)."""
    del step
    marked = ["model.forward"] if hasattr(target.model, MARK) else []
    return problems.told("model.already-wrapped", marked, "runs under prepkit's autocast already", problems.PLAIN)


def autocast_do(step: AutocastForward, target: Target) -> Any:
    """Puts an ``AutocastedForward`` into the instance; returns what stood there, None for the class's own."""
    own = vars(target.model).get("forward")
    patched = AutocastedForward(
        target.model.forward, step.device, getattr(torch, step.dtype), getattr(torch, step.output_dtype)
    )
    try:
        vars(target.model).update({"forward": patched, MARK: True})
        return own
    except BaseException:
        autocast_undo(step, target, own)
        raise


def autocast_undo(step: AutocastForward, target: Target, memo: Any) -> None:
    """Leaves the instance with exactly the forward that it had, or with none."""
    del step
    vars(target.model).pop(MARK, None)
    vars(target.model).pop("forward", None)
    if memo is not None:
        vars(target.model)["forward"] = memo


AUTOCAST: Handler[AutocastForward, Target, Any] = Handler(ready=autocast_ready, do=autocast_do, undo=autocast_undo)
