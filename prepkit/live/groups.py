"""The end of process groups."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def end() -> list[Any]:
    """Ends the default group and its sub-groups, and returns them.

    The caller holds them for a while: a worker thread of gloo may still have the last work in its hands, and with it
    the group. Were that thread the last to hold the group it would have to wait for itself, and torch aborts the
    process ("Resource deadlock avoided").
    """
    held: list[Any] = list(dist.distributed_c10d._world.pg_map)  # torch has no public list of them
    dist.destroy_process_group()
    return held
