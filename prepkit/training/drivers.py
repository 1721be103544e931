"""What ``Prepared`` asks of the engine that wraps the model, and clipping over whatever the parameters have become.

Engines differ in four things: how averaging is switched off inside an accumulation window, how gradients are clipped,
and whether they run backward and the optimizer step themselves, as DeepSpeed does. A ``Driver`` holds these four.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import isinf
from typing import Any, assert_never

import torch
from attrs import evolve, frozen
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from prepkit.config import Clip, ClipNorm, ClipValue
from prepkit.objects import fsdp1_flat
from prepkit.objects.names import known_bases
from prepkit.ranks.world import ranks_of
from prepkit.training import left_out


@frozen(kw_only=True, eq=False, repr=False)
class Driver:
    """What one engine does in a training loop; where a field is None, ``Prepared`` does it itself."""

    sync: Callable[[Module, bool], None]
    """Says whether the next forward and backward average gradients over the ranks. Called before the forward."""
    clip: Callable[[Module, Clip, Iterable[Parameter]], torch.Tensor | None] = lambda _, how, params: clip(how, params)
    """Clips the gradients of these parameters in place; returns their joint norm where it had to be known."""
    norm: Callable[[Module, list[Parameter], float], torch.Tensor] = lambda _, params, power: total_norm(params, power)
    """The joint norm of the gradients of these parameters, each of which has one; changes none."""
    settle: Callable[[Module], None] = lambda _: None
    """Frees what a forward without a backward has left gathered: the next forward would use it after the step."""
    backward: Callable[[Module, torch.Tensor], None] | None = None
    """Divides the loss and runs backward; None: the caller does."""
    averages: Callable[[Any], bool] | None = None
    """Whether the next backward averages, as the engine stands; None: as it was told."""
    left_out: Callable[..., None] = lambda *_, **__: None
    """Puts the engine to where a forward begins (``training.left_out``)."""
    holds: Callable[[Any], bool] | None = None
    """Whether there are gradients where ``.grad`` does not show them; None: it shows all."""
    step: Callable[[Module, bool], Stepped] | None = None
    """Ends a micro-batch, and clips, steps and clears at the end of a window; None: the caller does."""


@frozen(kw_only=True, eq=False, repr=False)
class Stepped:
    """What became of one micro-batch in an engine that steps by itself."""

    applied: bool
    """Whether parameters were updated: False between the ends of windows, and where a gradient overflowed."""
    norm: torch.Tensor | None
    """Joint norm of the gradients before clipping, at the end of a window."""


OFF: Any = 0
"""What is written into an engine's switch: equal to False, and told apart from what somebody else has switched off."""


def _sync_ddp(model: Module, on: bool) -> None:
    assert isinstance(model, DistributedDataParallel)
    # A static graph is learnt in the first backward that averages, and none may come before it (torch reducer.cpp).
    # What has been averaged once stays the same in the average at the end of the window.
    learns = model.static_graph and not getattr(model, "_static_graph_delay_allreduce_enqueued", True)
    if model.require_backward_grad_sync is not False:  # ``no_sync`` stands, and puts back what it has found
        model.require_backward_grad_sync = on or learns or OFF  # DDP reads it in forward


def _sync_fsdp2(units: tuple[tuple[FSDPModule, tuple[Any, ...]], ...], on: bool) -> None:
    for unit, groups in units:
        if all(group.reduce_grads is not False for group in groups):  # else somebody else has switched it off
            unit.set_requires_gradient_sync(on or OFF, recurse=False)


def reshard(model: Module) -> None:
    """Frees the gathered parameters of every unit of FSDP2; those that are sharded already cost a look."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _sync_nothing(model: Module, on: bool) -> None:
    del model, on


def _sync_deepspeed(model: Any, on: bool) -> None:
    model.set_gradient_accumulation_boundary(on)  # the engine's own count would miss a window that ends early


def _backward_deepspeed(model: Any, loss: torch.Tensor) -> None:
    model.backward(loss)  # divides by the accumulation steps of the engine (W-25)


def _scale_in_norm(optimizer: Any) -> float:
    """What the norm is multiplied by that an optimizer of stage 0 gives where it is not fused; 1 for all others."""
    unfused = type(optimizer).__name__ == "FP16_UnfusedOptimizer"
    return float(optimizer.loss_scale) if unfused else 1.0


def _step_deepspeed(model: Any, last: bool) -> Stepped:
    """Called for every micro-batch: the engine counts them, and acts on the last of a window only (W-23)."""
    norm, scale = None, _scale_in_norm(model.optimizer)
    if last and not (model.zero_optimization() or model.fp16_enabled() or model.bfloat16_enabled()):
        params = [param for param in model.module.parameters() if param.grad is not None]
        norm = total_norm(params, 2.0)  # the engine clips in this case, and forgets the norm
    model.step()
    if last and norm is None and (joint := model.get_global_grad_norm()) is not None:
        norm = torch.as_tensor(joint) / scale
    return Stepped(applied=bool(model.was_step_applied()), norm=norm)


def sync_fsdp1(units: Iterable[FullyShardedDataParallel], on: bool) -> None:
    """Sets what ``FullyShardedDataParallel.no_sync`` sets; every unit reads it in backward."""
    for unit in units:
        if unit._sync_gradients is not False:  # ``no_sync`` stands, and puts back what it has found
            unit._sync_gradients = on or 0  # type: ignore[assignment]  # torch gives nn.Module's attributes no types


def _fsdp1_holds(units: Iterable[FullyShardedDataParallel]) -> bool:
    """Return whether a flat parameter has a gradient of a backward that no step has followed."""
    flats: Iterable[Any] = (unit._handle.flat_param for unit in units if unit._handle is not None)
    return any(flat.grad is not None or getattr(flat, "_saved_grad_shard", None) is not None for flat in flats)


def _fsdp1_clip(model: Module, how: Clip, params: Iterable[Parameter]) -> torch.Tensor | None:
    """As ``FullyShardedDataParallel.clip_grad_norm_``, but over the optimizer's parameters alone. Collective."""
    return clip(how, params, partial(_fsdp1_norm, model))


def _fsdp1_norm(model: Module, params: list[Parameter], power: float) -> torch.Tensor:
    """The p-norm of all gradients as one vector: shards summed over the ranks that share them, whole ones once."""
    assert isinstance(model, FullyShardedDataParallel), "the table of drivers gives this one FSDP1 models only"
    shards = {id(param) for params_of_unit in _fsdp1_sharded(model) for param in params_of_unit}
    device: Any = model.compute_device
    parts = [_in_float32([p for p in params if (id(p) in shards) is which], power, device) for which in (True, False)]
    if shards:
        ranks = ranks_of(model.process_group)
        parts[0] = ranks.worst(parts[0]) if isinf(power) else ranks.total(parts[0] ** power) ** (1.0 / power)
    joint: torch.Tensor = torch.linalg.vector_norm(torch.stack(parts), power)
    return joint


def _fsdp1_sharded(model: Module) -> Iterable[tuple[Parameter, ...]]:
    """The parameters whose gradients are shards."""
    for unit in fsdp1_flat.units(model).values():
        handle = unit._handle
        if handle is not None and handle.uses_sharded_strategy:
            yield tuple(handle.flat_param._params or ()) or (handle.flat_param,)  # its own ones, where it kept them


def _in_float32(params: list[Parameter], power: float, device: torch.device) -> torch.Tensor:
    """The norm of these, as torch computes it; 0 without gradients."""
    grads = [param.grad.detach().float() for param in params if param.grad is not None and param.grad.numel()]
    if not grads:
        return torch.zeros((), dtype=torch.float32, device=device)
    return get_total_norm(grads, power).to(device)


DRIVERS: tuple[tuple[type, Driver], ...] = (
    (
        DistributedDataParallel,
        Driver(sync=_sync_ddp, averages=lambda model: bool(model.require_backward_grad_sync), left_out=left_out.ddp),
    ),
    (FSDPModule, Driver(sync=_sync_nothing, settle=reshard)),
    (FullyShardedDataParallel, Driver(sync=_sync_nothing, clip=_fsdp1_clip, norm=_fsdp1_norm)),
    (Module, Driver(sync=_sync_nothing)),
)
DEEPSPEED = Driver(
    sync=_sync_deepspeed,
    averages=lambda model: (
        model.is_gradient_accumulation_boundary() and not getattr(model, "inside_no_sync_ctxt", False)
    ),
    left_out=left_out.deepspeed,
    holds=left_out.holds_gradients,
    backward=_backward_deepspeed,
    step=_step_deepspeed,
)
"""Class of the outermost module to its driver; the first that fits. Units are looked up once (``driver``)."""


def driver(model: Module) -> Driver:
    """The driver of a prepared model."""
    if "DeepSpeedEngine" in known_bases(type(model)):  # by name, so that DeepSpeed need not be there
        return DEEPSPEED
    found = next(own for kind, own in DRIVERS if isinstance(model, kind))
    if isinstance(model, FSDPModule):  # a walk through all modules in every micro-batch would be part of its time
        units = tuple(module for module in model.modules() if isinstance(module, FSDPModule))
        switches = tuple((unit, tuple(left_out.groups(unit))) for unit in units)
        first = next((group for _, groups in switches for group in groups), None)
        return evolve(
            found,
            sync=lambda _, on: _sync_fsdp2(switches, on),
            averages=None if first is None else lambda _: bool(first.reduce_grads),
            left_out=lambda _, **how: left_out.fsdp2(units, **how),
        )
    if isinstance(model, FullyShardedDataParallel):
        wrapped = tuple(fsdp1_flat.units(model).values())
        return evolve(
            found,
            sync=lambda _, on: sync_fsdp1(wrapped, on),
            averages=lambda model: bool(model._sync_gradients),
            left_out=lambda _, **how: left_out.fsdp1(wrapped, **how),
            holds=lambda _: _fsdp1_holds(wrapped),
        )
    return found


def clip(
    how: Clip, params: Iterable[Parameter], norm_of: Callable[[list[Parameter], float], torch.Tensor] | None = None
) -> torch.Tensor | None:
    """Clips the gradients in place; returns their joint norm before clipping where it had to be known.

    The norm is over all ranks' shards: on every rank the same whole scalar. Collective for sharded parameters.
    ``norm_of``: of shards that are plain tensors, as FSDP1's; None: ``total_norm``.
    """
    with_grad = [param for param in params if param.grad is not None]
    match how:
        case None:
            return None
        case ClipNorm(max_norm=most, norm_type=power):
            groups = _by_mesh(with_grad)
            norm = norm_of(with_grad, power) if norm_of else _norm_of(groups, power)
            for group in groups:
                clip_grads_with_norm_(group, most, norm)
            return norm
        case ClipValue(max_value=most):
            for group in _by_mesh(with_grad):
                clip_grad_value_(group, most)
            return None
        case _:
            assert_never(how)


def total_norm(params: Sequence[Parameter], power: float) -> torch.Tensor:
    """The p-norm of all gradients as one vector, whole ones and shards on any mesh together; 0 without gradients."""
    return _norm_of(_by_mesh(params), power)


def _norm_of(groups: Sequence[Sequence[Parameter]], power: float) -> torch.Tensor:
    grads = ([param.grad for param in group if param.grad is not None] for group in groups)
    norms = [_whole(get_total_norm(group, power)) for group in grads]
    if not norms:
        return torch.zeros((), dtype=torch.float32)
    if len(norms) == 1:
        return norms[0]
    joint: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), power)
    return joint


def _by_mesh(params: Sequence[Parameter]) -> list[list[Parameter]]:
    """Plain parameters, and those of each mesh: torch's fused kernels take no mixture."""
    groups: dict[DeviceMesh | None, list[Parameter]] = defaultdict(list)
    for param in params:
        groups[param.device_mesh if isinstance(param, DTensor) else None].append(param)
    return list(groups.values())


def _whole(norm: torch.Tensor) -> torch.Tensor:
    if not isinstance(norm, DTensor):
        return norm
    whole: torch.Tensor = norm.full_tensor()
    return whole
