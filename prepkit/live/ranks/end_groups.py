"""The end of process groups, and of what torch leaves behind with them."""

from __future__ import annotations

import atexit
import gc
import inspect
import sys
import traceback
from typing import Any

import torch.distributed as dist

from prepkit.live.ranks.resting import until_threads_rest


def end() -> list[Any]:
    """Ends the default group and its sub-groups, and returns them.

    A worker thread of gloo may still have the last work in its hands, and with it the group. Were that thread the last
    to hold the group it would have to wait for itself, and torch aborts the process ("Resource deadlock avoided"). So
    such threads are waited for, and the caller holds the groups for a while, as the wait has a limit.
    """
    ended: list[Any] = list(dist.distributed_c10d._world.pg_map)  # torch has no public list of them
    dist.destroy_process_group()
    forget_meshes()
    restore_excepthook()
    until_threads_rest()
    return ended


def end_with_the_process() -> None:
    """Ends gloo's groups before the interpreter goes, where a program ends without ``Prepared.close``. Not collective.

    A worker thread of gloo that frees the last work meanwhile would need the interpreter, and torch aborts the process
    behind its last line ("terminate called without an active exception", exit status -6). NCCL has no such thread, and
    its end may wait for ranks that have failed.
    """
    atexit.unregister(_end_gloo)  # once, however often a process applies
    atexit.register(_end_gloo)


def _end_gloo() -> None:
    if dist.is_initialized() and "nccl" not in str(dist.get_backend_config()):
        end()


def forget_unformed() -> None:
    """Gives back the name of a default group that was given up while it was formed.

    torch numbers groups by a counter of each process: a rank that is one ahead would look for the others' next group
    under another key of the store, until its time-out. The end of a group that was formed resets the counter too.
    """
    if not dist.is_initialized():
        dist.distributed_c10d._world.group_count = 0


def disconnect(error: BaseException | None) -> None:
    """Closes this rank's connections: gloo's ``abort`` closes none (torch 2.13), the end of the group's object does."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)  # they hold half-made wrappers, and these hold the group
        error = error.__cause__ or error.__context__
    if "nccl" in str(dist.get_backend_config()):
        dist.distributed_c10d._abort_process_group()  # its kernels would keep an orderly end waiting
    else:
        until_threads_rest()
        dist.destroy_process_group()
    restore_excepthook()
    gc.collect()  # a half-made DistributedDataParallel refers to itself


def restore_excepthook() -> None:
    """Takes off the hooks that torch has put around ``sys.excepthook``, one with every default group that it started.

    Each would put the rank before every line of an uncaught exception once more. A hook that somebody else has put
    around torch's stays, and torch's with it.
    """
    hook = sys.excepthook
    while getattr(hook, "__qualname__", "") == "init_process_group.<locals>._distributed_excepthook":
        inner = inspect.getclosurevars(hook).nonlocals.get("old_hook")
        if inner is None:
            break
        hook = inner
    sys.excepthook = hook


def forget_meshes() -> None:
    """Makes DTensor forget the meshes of groups that have ended.

    It remembers how operations are sharded, and meshes compare equal whatever their groups are called: under the next
    default group it would go on with the old mesh ("Could not resolve the process group").
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _redistribute, debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)  # private, and so may go
    for forget in (clear, getattr(getattr(_redistribute, "_gen_transform_infos", None), "cache_clear", None)):
        if forget is not None:
            forget()
