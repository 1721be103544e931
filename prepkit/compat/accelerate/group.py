"""The process group of a script that talks to other ranks before there is a plan."""

from __future__ import annotations

import atexit
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, but not exported for checkers

from prepkit.compat.accelerate.not_offered import BEFORE, NotOffered
from prepkit.ranks import end_groups, launcher, rendezvous
from prepkit.ranks.world import world

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Device type to the backend of a group that any plan takes over: gloo as well, for what is offloaded."""

GROUPS = count()
"""Numbers of the groups that this process has joined: the keys of one that has ended would lead the next one astray."""


def is_alone() -> bool:
    """Return whether there is one process."""
    return world().size == 1 if world().running else launcher.processes() == 1


def join(device: torch.device, timeout_s: float = 600.0) -> None:
    """Starts the process group where there are several processes and it does not run yet. Collective.

    Raises ``NotOffered`` on a device whose backend only a plan chooses, and ``RankFailed`` where not all ranks come.
    """
    if world().running or is_alone():
        return
    backend = BACKENDS.get(device.type)
    if backend is None:
        what = "call it after accelerator.prepare, which starts the process group"
        raise NotOffered(f"talking to other ranks before prepare on {device.type}", what, BEFORE)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, rank, ranks = rendezvous.meet(timeout_s)
    timeout = timedelta(seconds=timeout_s)
    own = PrefixStore(f"accelerate {next(GROUPS)}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=ranks, timeout=timeout)
    end_groups.end_with_the_process()


def leave() -> None:
    """Ends the process group, where there is one, when all ranks are here."""
    if world().running:
        world().meet()
        hold(end_groups.end())


def hold(ended: list[Any]) -> None:
    """Keeps groups that have ended until the process does: the end of a script often frees all else right behind it.

    A thread of gloo may still use them (``end_groups.end``).
    """
    atexit.register(ended.clear)
