"""The end of process groups, and of what torch leaves behind with them."""

from __future__ import annotations

import atexit
import gc
import inspect
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from prepkit.findings import Finding
from prepkit.findings.text import count
from prepkit.ranks.world import world
from prepkit.rules import found


def end_unless_used(own: Module, hear: Callable[[tuple[Finding, ...]], None], *, others: int) -> list[Any]:
    """Ends the groups as ``end`` does, unless another model still uses one on some rank. Collective.

    ``others`` that were prepared and are open on this rank may go on, and nothing is told: the last one ends the group.

    Any other wrapper could neither train on nor be freed safely under a group that has ended. The group is then left to
    the process (``end_with_the_process``), which rank 0 tells ``hear``. ``own`` is the model whose run is closed: an
    FSDP1 wrapper of it does not count, which every output that a script still has keeps alive by its graph.
    """
    users = [one for one in _users(own) if isinstance(one, DistributedDataParallel) or not _wraps(one, own)]
    of_others = [one for one in users if not _wraps(one, own)]
    most = world().worst(torch.tensor([others, len(users)], device="cpu")).tolist()
    if any(most):
        if world().is_first and not most[0]:
            hear((_in_use(of_others or users, own=not of_others),))
        return []
    return end()


def _in_use(users: list[Module], *, own: bool) -> Finding:
    who = f"{count(len(users), 'wrapper')} here ({', '.join(sorted({type(one).__name__ for one in users}))})"
    if not users:
        return found("run.group-in-use", "process group", "A wrapper on another rank still uses it")
    if own:
        what = f"{who} of the model that is closed still uses it: a variable holds what ready.model was"
        return found("run.group-in-use", "process group", what, "Delete such variables before ready.close().")
    return found("run.group-in-use", "process group", f"{who} of another model still uses it")


def _wraps(wrapper: Module, own: Module) -> bool:
    return any(one is own for one in wrapper.modules())


def _users(own: Module) -> list[Module]:
    """Living DDP and FSDP1 wrappers outside of ``own`` that use the default group or a subgroup."""
    groups = set(map(id, dist.distributed_c10d._world.pg_map))  # torch has no public list of them
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: nothing is wrapped by it
    kinds = (DistributedDataParallel, *(() if fsdp is None else (fsdp.FullyShardedDataParallel,)))
    inside = set(map(id, own.modules()))
    wrappers = [one for one in gc.get_objects() if issubclass(type(one), kinds) and id(one) not in inside]
    return [one for one in wrappers if id(getattr(one, "process_group", None)) in groups]


def end() -> list[Any]:
    """Ends the default group and its subgroups, and returns them.

    A worker thread of gloo may still hold the last work, and with it the group. Were that thread the last to hold the
    group, it would have to wait for itself, and torch aborts the process ("Resource deadlock avoided"). So such threads
    are waited for, and the caller holds the groups for a while, as the wait has a limit.
    """
    ended: list[Any] = list(dist.distributed_c10d._world.pg_map)  # torch has no public list of them
    dist.destroy_process_group()
    forget_meshes()
    restore_excepthook()
    until_threads_rest()
    return ended


def end_with_the_process() -> None:
    """Ends gloo's groups before the interpreter goes, where a program ends without ``Prepared.close``. Not collective.

    NCCL's are left alone: their end may wait for ranks that have failed.
    """
    rest_with_the_process()
    atexit.unregister(_end_gloo)  # once, however often a process applies
    atexit.register(_end_gloo)  # exit functions run last to first


def rest_with_the_process() -> None:
    """Waits for gloo's threads before the interpreter goes, whoever started the group, or has ended it by then.

    A group that a wrapper of anybody's still holds keeps its threads when it is ended. One of them that frees the last
    work while Python shuts down needs the interpreter, and torch aborts the process after its last line ("terminate
    called without an active exception", exit status -6).
    """
    atexit.unregister(until_threads_rest)
    atexit.register(until_threads_rest)


def _end_gloo() -> None:
    if world().running and "nccl" not in world().backend:
        end()


def forget_unformed() -> None:
    """Gives back the name of a default group that was given up while it was formed.

    torch numbers groups by a counter of each process: a rank that is one ahead would look for the others' next group
    under another key of the store, until its time-out. The end of a group that was formed resets the counter too.
    """
    if not world().running:
        dist.distributed_c10d._world.group_count = 0


def disconnect(error: BaseException | None) -> None:
    """Closes this rank's connections: gloo's ``abort`` closes none (torch 2.13), the end of the group's object does."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)  # they hold half-made wrappers, and these hold the group
        error = error.__cause__ or error.__context__
    if "nccl" in world().backend:
        dist.distributed_c10d._abort_process_group()  # its kernels would keep an orderly end waiting
    else:
        until_threads_rest()
        dist.destroy_process_group()
    restore_excepthook()
    gc.collect()  # a half-made DistributedDataParallel refers to itself


def restore_excepthook() -> None:
    """Removes the hooks that torch puts around ``sys.excepthook``, one for every default group that it starts.

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


THREADS = Path("/proc/self/task")
"""A folder for each thread of this process, on Linux."""
GLOO = "pt_gloo"
"""How torch's names for gloo's worker threads begin (``ProcessGroupGloo::runLoop``, torch 2.6 and newer)."""
LOOK_S = 0.001
LOOKS = 3
"""Looks in a row that find nothing running: between two of them a thread that waits for the interpreter gets it."""
ELSEWHERE_S = 0.05
"""How long to wait where nothing says what threads do."""


def until_threads_rest(most_s: float = 10.0) -> bool:
    """Waits until no worker thread of gloo runs or is about to; False where some still do after ``most_s``.

    Such a thread reports that its work is done before it frees the work, and with it the group. Other threads are the
    script's own, and may run for as long as they like.
    """
    if not THREADS.is_dir():
        time.sleep(min(ELSEWHERE_S, most_s))
        return False
    until, quiet = time.monotonic() + most_s, 0
    while quiet < LOOKS:
        if time.monotonic() > until:
            return False
        time.sleep(LOOK_S)
        quiet = 0 if any(map(_is_at_work, THREADS.iterdir())) else quiet + 1
    return True


def _is_at_work(thread: Path) -> bool:
    try:
        said = (thread / "stat").read_text()
    except OSError:  # it has ended meanwhile
        return False
    name, _, rest = said.partition("(")[2].rpartition(")")
    return name.startswith(GLOO) and rest.split()[0] == "R"
