"""Time-outs of process groups that others make: torch gives each 30 minutes, whatever the default group has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from prepkit.ranks.world import world


def default_limit() -> timedelta | None:
    """The time-out of the default group; None where there is none, or its backend has none."""
    if not world().running:
        return None
    group: Any = dist.group.WORLD
    limits = [
        getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
        for device in group._device_types  # torch has no public list of them
    ]
    return next((limit for limit in limits if limit is not None), None)


@contextmanager
def as_default_group() -> Iterator[None]:
    """Inside, a group that is made without a time-out gets that of the default group (torch ``new_group``).

    ``init_device_mesh``, FSDP1 and DeepSpeed make theirs so, and say nowhere how long they wait.
    """
    limit = default_limit()
    before = getattr(dist.distributed_c10d, "_get_default_timeout", None)  # private, and so may go
    if limit is None or before is None:
        yield
        return
    c10d: Any = dist.distributed_c10d
    c10d._get_default_timeout = lambda _: limit
    try:
        yield
    finally:
        c10d._get_default_timeout = before
