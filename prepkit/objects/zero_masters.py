"""Where DeepSpeed keeps what it trains: of each parameter the run of master weights that is this rank's.

Every optimizer of DeepSpeed's flattens the parameters of a group, and steps the flat tensor (or a rank's part of it);
the state of the optimizer inside is that of the flat tensor. DeepSpeed 0.19: ``stage_1_and_2.py``, ``stage3.py``,
``bf16_optimizer.py``, ``fp16/fused_optimizer.py``, ``fp16/unfused_optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from prepkit.findings import RunRefused
from prepkit.objects import names
from prepkit.objects.flat_range import FlatRange
from prepkit.rules import found

ZERO3 = "DeepSpeedZeroOptimizer_Stage3"
WITHOUT = "DeepSpeedZeRoOffload"
"""What stands in the place of an optimizer where ZeRO-3 only shards, as for inference."""
MAPPED = {"DeepSpeedZeroOptimizer": "bit16_groups", "BF16_Optimizer": "bf16_groups"}
"""Optimizers that note at each parameter which run of it this rank steps (``_hp_mapping``), and their groups."""
HALF = {"FP16_Optimizer": "fp32_groups_flat", "FP16_UnfusedOptimizer": "fp32_groups"}
"""Float16 without ZeRO: every rank holds all master weights, flat per group or one by one."""


@frozen(eq=False, repr=False)
class Master:
    """A run of one parameter's master weights: ``numel`` elements from ``start`` on, at ``at`` of a flat tensor."""

    param: Parameter
    shape: tuple[int, ...]
    """Of the whole parameter."""
    flat: Tensor
    """What the optimizer inside steps."""
    at: int
    start: int
    numel: int

    def part(self, flat: Tensor) -> FlatRange:
        """The run in a tensor that lies as the flat one: the master weights themselves, or a state of them."""
        return FlatRange(flat.detach().reshape(-1)[self.at : self.at + self.numel], self.start, self.shape)

    def whole(self) -> bool:
        """True if this rank has all of it."""
        return self.numel == prod(self.shape)


def refuse_unreadable(engine: Any) -> None:
    """Raises ``RunRefused`` for what cannot be told apart by parameter, and says what to type."""
    inner = engine.optimizer
    kind = "" if inner is None else type(inner).__name__
    readable = not steps(engine) or kind in (ZERO3, *MAPPED, *HALF) or isinstance(inner, Optimizer)
    why = "" if readable else f"its optimizer is a {kind}"
    if type(engine).__name__ != "DeepSpeedEngine":
        why = f"it is a {type(engine).__name__}"
    if getattr(engine, "has_moe_layers", False):
        why = "its experts lie on different ranks"
    if callable(getattr(engine, "autotp_size", None)) and engine.autotp_size() > 1:
        why = "it has split the layers over ranks"
    if getattr(inner, "swap_optimizer", False) or getattr(inner, "params_in_nvme_and_cpu", False):
        why = "it keeps its state on NVMe"
    if getattr(inner, "zenflow", False):
        why = "ZenFlow steps behind the training"
    if why:
        what = f"prepkit cannot read what DeepSpeed holds: {why}"
        raise RunRefused((found("checkpoint.deepspeed-state", "model", what),))


def steps(engine: Any) -> bool:
    """True if there is an optimizer at all."""
    return engine.optimizer is not None and type(engine.optimizer).__name__ != WITHOUT


def base(engine: Any) -> Any:
    """The optimizer inside DeepSpeed's: the one whose state counts; None without one."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def groups(engine: Any) -> list[list[Parameter]]:
    """The model's own parameters in each group of the optimizer inside; none without one."""
    if not steps(engine):
        return []
    wrapper = engine.optimizer
    kind = type(wrapper).__name__
    if kind == ZERO3:
        found: list[list[Parameter]] = [[] for _ in base(engine).param_groups]
        for number, params in enumerate(wrapper.fp16_groups):
            found[wrapper.sub_group_to_group_id[number]] += params
        return found
    if kind in HALF:
        return [list(params) for params in wrapper.fp16_groups]
    if kind in MAPPED:
        return [list(params) for params in getattr(wrapper, MAPPED[kind])]
    return [list(group["params"]) for group in wrapper.param_groups]


def masters(engine: Any) -> dict[str, Master]:
    """Canonical name to this rank's run, of every parameter that is stepped and of which this rank has a part."""
    if not steps(engine):
        return {}
    first = {id(param): name for name, param in names.named_parameters(engine).items()}
    return {first[id(one.param)]: one for one in _masters(engine.optimizer) if id(one.param) in first and one.numel}


def _masters(wrapper: Any) -> Iterator[Master]:
    kind = type(wrapper).__name__
    if kind == ZERO3:
        yield from _zero3(wrapper)
    elif kind in MAPPED:
        yield from _mapped(wrapper, getattr(wrapper, MAPPED[kind]))
    elif kind in HALF:
        yield from _half(wrapper, getattr(wrapper, HALF[kind]))
    else:
        for group in wrapper.param_groups:
            for param in group["params"]:
                yield Master(param, tuple(param.shape), param, 0, 0, param.numel())


def _zero3(wrapper: Any) -> Iterator[Master]:
    for params in wrapper.fp16_groups:
        for param in params:
            group, at, size = wrapper.grad_position[wrapper.get_param_id(param)]
            start = wrapper._get_param_partition_rank(param) * size
            numel = max(0, min(size, param.ds_numel - start))  # the last part is filled up
            yield Master(param, tuple(param.ds_shape), wrapper.fp32_partitioned_groups_flat[group], at, start, numel)


def _mapped(wrapper: Any, groups: list[list[Parameter]]) -> Iterator[Master]:
    flats = getattr(wrapper, "single_partition_of_fp32_groups", None) or wrapper.fp32_groups_flat_partition
    for params, flat in zip(groups, flats, strict=True):
        for param in params:
            place: Any = getattr(param, "_hp_mapping", None)
            if place is not None:
                run = place.hp_fragment_address
                start = place.lp_fragment_address.start
                yield Master(param, tuple(param.shape), flat, run.start, start, run.numel)


def _half(wrapper: Any, held: list[Any]) -> Iterator[Master]:
    for params, masters in zip(wrapper.fp16_groups, held, strict=True):
        at = 0
        for index, param in enumerate(params):
            flat = masters if isinstance(masters, Tensor) else masters[index]
            yield Master(param, tuple(param.shape), flat, at if flat is masters else 0, 0, param.numel())
            at += param.numel()


@contextmanager
def in_groups(wrapper: Any) -> Iterator[None]:
    """Inside, groups of the optimizer in ZeRO 3 hold its master weights, as they do in its own steps alone."""
    if type(wrapper).__name__ != ZERO3:
        yield
        return
    groups = wrapper.optimizer.param_groups
    before = [group["params"] for group in groups]
    for index, group in enumerate(groups):
        flats = enumerate(wrapper.fp32_partitioned_groups_flat)
        group["params"] = [flat for at, flat in flats if wrapper.sub_group_to_group_id[at] == index]
    try:
        yield
    finally:
        for group, params in zip(groups, before, strict=True):
            group["params"] = params


def refresh(engine: Any) -> None:
    """Makes what the model computes with, in its own dtype and place, what the master weights say. Collective."""
    wrapper = engine.optimizer
    kind = type(wrapper).__name__
    with torch.no_grad():
        if kind in MAPPED:
            wrapper.update_lp_params()
        elif kind == ZERO3:
            for one in _masters(wrapper):
                part: Any = vars(one.param)["ds_tensor"]
                part.detach().reshape(-1)[: one.numel].copy_(one.part(one.flat).values)
            gather_again(wrapper)
        elif kind in HALF:
            for one in _masters(wrapper):
                one.param.copy_(one.part(one.flat).values.view(one.shape))


def gather_again(wrapper: Any) -> None:
    """ZeRO-3 keeps small parameters whole on every rank, which are copies of the parts (``checkpoint_event_*``)."""
    wrapper.invalidate_secondary_tensor()
    if wrapper.persistent_parameters:
        wrapper.persistent_parameters[0].partition(wrapper.persistent_parameters)
        wrapper.persistent_parameters[0].all_gather(wrapper.persistent_parameters)
