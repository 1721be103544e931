"""What ``fully_shard`` left on each unit: hooks that gather it, and the policies that were asked for.

torch keeps these in private attributes (``_fsdp_state.py``, ``_fsdp_param_group.py``); one that a version of torch
does not have is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.nn import Module

from prepkit.attestation import Check, each
from prepkit.live.standing import Standing
from prepkit.steps import ShardUnits, Unit


def checks(step: ShardUnits, standing: Standing) -> Iterator[Check]:
    """Hooks and policies of the units that are there; a missing one has been told already."""
    found = [
        (unit, module) for unit in step.units for module in standing.at(unit.path) if isinstance(module, FSDPModule)
    ]
    hooks = [f"{unit.path or 'the root'} has none" for unit, module in found if not _gathers(module)]
    yield each("ShardUnits", "a hook gathers each unit", hooks)
    bad = [f"{unit.path or 'the root'}: {text}" for unit, module in found for text in _policies(step, unit, module)]
    yield each("ShardUnits", "dtypes, offload and resharding of each unit", bad)


def _gathers(module: Any) -> bool:
    state = module._get_fsdp_state()
    hooks = (module._forward_pre_hooks, module._forward_hooks)
    return all(any(_of(state, hook) for hook in held.values()) for held in hooks)


def _of(state: Any, hook: Any) -> bool:
    """Whether a hook is a method of this state, also below the wrappers that torch puts around it."""
    for _ in range(4):
        if getattr(hook, "__self__", None) is state:
            return True
        hook = getattr(hook, "__wrapped__", None)
    return False


def _policies(step: ShardUnits, unit: Unit, module: Module) -> Iterator[str]:
    state: Any = module._get_fsdp_state()  # type: ignore[operator]  # an FSDPModule; torch types attributes as tensors
    policy = state._mp_policy
    wanted = (step.param_dtype, step.reduce_dtype, unit.output_dtype)
    found = tuple(_name(dtype) for dtype in (policy.param_dtype, policy.reduce_dtype, policy.output_dtype))
    if wanted != found:
        yield f"parameter, reduction and output dtype planned {wanted}, found {found}"
    groups = getattr(state, "_fsdp_param_groups", None) or (getattr(state, "_fsdp_param_group", None),)
    for group in filter(None, groups):
        if (offloads := isinstance(group.offload_policy, CPUOffloadPolicy)) != step.offload:
            yield f"offload planned {step.offload}, found {offloads}"
        if (reshards := group.post_forward_mesh_info is not None) != (unit.reshard_after_forward is not False):
            yield f"reshard_after_forward planned {unit.reshard_after_forward}, found {reshards}"


def _name(dtype: object) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
