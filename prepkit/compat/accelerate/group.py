"""The process group of a script that talks to other ranks before there is a plan."""

from __future__ import annotations

import atexit
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from prepkit.compat.accelerate.not_offered import BEFORE, NotOffered
from prepkit.ranks import end_groups, launcher
from prepkit.ranks.world import world

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Device type to the backend of a group that any plan takes over: gloo as well, for what is offloaded."""


def is_alone() -> bool:
    """Return whether there is one process."""
    return world().size == 1 if world().running else launcher.processes() == 1


def join(device: torch.device, timeout_s: float = 600.0) -> None:
    """Starts the process group where there are several processes and it does not run yet. Collective.

    Raises ``NotOffered`` on a device whose backend only a plan chooses.
    """
    if world().running or is_alone():
        return
    backend = BACKENDS.get(device.type)
    if backend is None:
        what = "call it after accelerator.prepare, which starts the process group"
        raise NotOffered(f"talking to other ranks before prepare on {device.type}", what, BEFORE)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
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
