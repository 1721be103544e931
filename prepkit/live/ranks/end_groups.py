"""The end of process groups."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist


def end() -> list[Any]:
    """Ends the default group and its sub-groups, and returns them.

    The caller holds them for a while: a worker thread of gloo may still have the last work in its hands, and with it
    the group. Were that thread the last to hold the group it would have to wait for itself, and torch aborts the
    process ("Resource deadlock avoided").
    """
    ended: list[Any] = list(dist.distributed_c10d._world.pg_map)  # torch has no public list of them
    dist.destroy_process_group()
    forget_meshes()
    return ended


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
