"""An engine after a micro-batch that did not come to its end: its forward or backward has raised, and was caught.

Or it has left out what other ranks wait for. What torch and DeepSpeed note while they run is put to where a forward
begins. ``drop`` says that the gradients of the window are thrown away as well, ``failed`` that its backward has
raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel


def ddp(model: Module, *, drop: bool, failed: bool) -> None:
    """Its reducer waits on every rank for the same: a forward that averages may have run on some of them alone.

    Where nothing has failed every rank waits for the next backward, as it does after a forward: what is averaged one
    backward early stays so. Else, and where each forward says what it has used, none waits (torch
    ``Reducer::prepare_for_backward``, ``Reducer::reset_state``).
    """
    assert isinstance(model, DistributedDataParallel)
    del drop
    if failed or model.find_unused_parameters:
        if hasattr(model, "_update_process_group"):  # its buckets are laid out anew, in a forward of all ranks
            model._update_process_group(model.process_group)  # type: ignore[no-untyped-call]  # torch has no types
    elif model.require_backward_grad_sync and torch.is_grad_enabled():
        model.reducer.prepare_for_backward([])


def fsdp1(units: Iterable[FullyShardedDataParallel], *, drop: bool, failed: bool) -> None:
    """Shards lie in their places again (torch ``_post_backward_final_callback``, without what it expects)."""
    del failed
    from torch.distributed.fsdp import _common_utils as states
    from torch.distributed.fsdp import _runtime_utils as torch_fsdp

    for unit in units:
        unit.training_state = states.TrainingState.IDLE
        if unit._is_root:
            vars(unit)["_post_backward_callback_queued"] = False
            unit._exec_order_data.next_iter()
        handle: Any = unit._handle
        if handle is None:
            continue
        flat: Any = handle.flat_param
        if handle.uses_sharded_strategy:  # the root keeps what it has gathered, whatever it shows
            torch_fsdp._reshard(unit, handle, free_unsharded_flat_param=True)
        for hook in getattr(flat, "_post_backward_hook_state", ())[-1:]:
            hook.remove()
            del flat._post_backward_hook_state
        flat._post_backward_called = False
        if drop:
            flat.grad = None
            vars(flat).pop("_saved_grad_shard", None)
        handle._ran_pre_backward_hook = handle._needs_pre_backward_unshard = handle._prefetched = False
        handle._needs_pre_forward_unshard = False
        handle._post_forward_index = None
        handle._training_state = states.HandleTrainingState.IDLE


def groups(unit: FSDPModule) -> Iterator[Any]:
    """The groups of parameters of a unit of FSDP2; torch before 2.11 has one or none."""
    state: Any = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        yield from state._fsdp_param_groups
    elif state._fsdp_param_group is not None:
        yield state._fsdp_param_group


def fsdp2(units: Iterable[FSDPModule], *, drop: bool, failed: bool) -> None:
    """Parameters are sharded, and no unit is inside a forward or backward (torch ``reset_iter_state``)."""
    del failed
    for unit in units:
        state: Any = unit._get_fsdp_state()
        if getattr(state, "_is_root", None) and hasattr(state, "_reset_iter_state"):
            state._reset_iter_state()
        state._training_state = type(state._training_state).IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        state._comm_ctx.post_forward_order.clear()
        for group in groups(unit):
            group._training_state = type(group._training_state).IDLE
            group._post_forward_indices.clear()
            group._to_sharded()
            for held in group.fsdp_params if drop else ():
                held.unsharded_accumulated_grad = None
                if (whole := getattr(held, "_unsharded_param", None)) is not None:
                    whole.grad = None


def deepspeed(engine: Any, *, drop: bool, failed: bool) -> None:
    """Nothing waits to be reduced, and what ZeRO 3 has gathered is let go."""
    optimizer = engine.optimizer
    if not hasattr(optimizer, "ipg_buckets"):
        return
    del failed
    hooks = getattr(optimizer, "_backward_hook_state", None)
    if hooks is not None:
        hooks.backward_active_depth = hooks.remaining_grad_acc_hooks = 0
        ran = hooks.epilogue_ran_this_backward
        hooks.reset_for_new_step()
        hooks.epilogue_ran_this_backward = ran and not drop
    if drop:
        for bucket in optimizer.ipg_buckets.values():
            getattr(bucket, "clear_params", bucket.clear)()
        done: Any = getattr(optimizer, "params_already_reduced", ())
        for key in done if isinstance(done, dict) else range(len(done)):
            done[key] = False
        getattr(optimizer, "extra_large_param_to_reduce", {}).clear()
        forget_gradients(engine)
    if hasattr(optimizer, "_get_param_coordinator"):
        optimizer._get_param_coordinator().release_and_reset_all(engine.module)


def forget_gradients(engine: Any) -> None:
    """A window begins anew: ``zero_grad`` of ZeRO 1 and 2 leaves what was averaged already, and the count."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "all_grad_tensors"):
        for held in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            held.update(dict.fromkeys(held))
        optimizer.micro_step_id = -1
    for param in engine.module.parameters():
        param.grad = None  # ZeRO 3's own way to clear fails on a CPU
    optimizer.zero_grad()


def holds_gradients(engine: Any) -> bool:
    """Return whether ZeRO has gradients of a backward that no step has followed."""
    optimizer = engine.optimizer
    if not hasattr(optimizer, "ipg_buckets"):
        return False
    return bool(optimizer.micro_step_id > (0 if hasattr(optimizer, "_get_param_coordinator") else -1))
