"""The process group, the agreement of its ranks, and the device mesh over them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch.distributed import DistError, HashStore, PrefixStore  # type: ignore[attr-defined]  # public, but not exported for checkers
from torch.distributed.device_mesh import init_device_mesh

from prepkit.applying.handlers import problems
from prepkit.court import refused
from prepkit.interpreter import Handler
from prepkit.objects.target import Target
from prepkit.ranks import end_groups, group_limits, launcher
from prepkit.ranks.within import within
from prepkit.ranks.world import world
from prepkit.steps import Agree, BuildMesh, LocalDevice, StartProcessGroup

FORMING_S = 5.0
"""Seconds after its own time-out at which torch has to have given up forming a group."""


def start_ready(step: StartProcessGroup, target: Target) -> problems.Problems:
    """A running group must be the plan's; else the launcher must have said what torch needs to start one."""
    del target
    if world().running:
        return _running_problems(step)
    device = _device(step.backend)
    return _launch_problems(step) + (() if device is None else launcher.device_problems(device.type))


def _other(where: str, what: str, fix: str) -> problems.Problems:
    """A launch that is not the plan's, with what to type; none where that is nothing."""
    return problems.told("plan.other-environment", [where] if fix else [], what, fix)


def _running_problems(step: StartProcessGroup) -> problems.Problems:
    running, wanted = _devices(world().backend), _devices(step.backend)
    # A fake group stands for any other: it carries no data and serves to rehearse.
    fits = (
        "fake" in running.values()
        or (set(wanted) == {""} and wanted[""] in running.values())
        or wanted.items() <= running.items()
    )
    size, backend = world().size, world().backend
    other_size, other_backend = size != step.world_size, not fits
    start = f"Start {step.world_size} processes, or build the plan again here."
    group = f"Call init_process_group({step.backend!r}), or plan with backend={backend!r}."
    return (
        *_other("process group", f"has {size} ranks, the plan is for {step.world_size}", start if other_size else ""),
        *_other(
            "process group", f"has backend {backend}, the plan wants {step.backend}", group if other_backend else ""
        ),
    )


def _launch_problems(step: StartProcessGroup) -> problems.Problems:
    launch = launcher.launch()
    run = f"torchrun --nproc-per-node={step.world_size} your_script.py"
    if not launch.launched:
        alone = f"the plan is for {step.world_size} ranks, but this process was started alone"
        return _other("launch", alone, "" if step.world_size == 1 else f"Type {run}.")
    if launch.missing and launch.by_mpi:
        here = f"MPI started {launch.world_size} processes on several nodes, and MASTER_ADDR is not set"
        return _other(
            "env.MASTER_ADDR", here, f"Type mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT={launcher.PORT} ..."
        )
    if launch.missing:
        fix = f"Start with {run}, or unset the others."
        return _other("launch", f"the launcher's {', '.join(launch.missing)} are not set", fix)
    wrong = f"is {launch.world_size}, the plan is for {step.world_size} ranks"
    start = f"Start {step.world_size} processes, or build the plan again here."
    return _other("env.WORLD_SIZE", wrong, start if launch.world_size != str(step.world_size) else "")


def start_do(step: StartProcessGroup, target: Target) -> bool:
    """Starts the group unless one runs; True when it did. One process needs no launcher: its store is a dict."""
    if world().running:
        target.together()
        return False
    if (device := _device(step.backend)) is not None:
        launcher.bind(device)
    target.together()  # before the group is formed: a rank that has failed will not come to form it
    try:
        _start(step, target)
        return world().running  # no constant: Python would return one from outside the try
    except BaseException:
        start_undo(step, target, world().running)
        end_groups.forget_unformed()
        raise


def _start(step: StartProcessGroup, target: Target) -> None:
    store = target.store
    timeout = timedelta(seconds=step.timeout_s)
    if store is not None:
        rank, ranks = launcher.place()
        shared = PrefixStore("default_pg", store)
        form = partial(
            dist.init_process_group, step.backend, store=shared, rank=rank, world_size=ranks, timeout=timeout
        )
        _formed(form, step, target)
    elif launcher.launch().launched:
        dist.init_process_group(step.backend, timeout=timeout)
    else:
        dist.init_process_group(step.backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)


def _formed(form: Callable[[], None], step: StartProcessGroup, target: Target) -> None:
    """Forms the group in a thread, and looks after the other ranks meanwhile: torch waits for each until its time-out.

    torch's own error names a key of the store; it is the cause of what is raised.
    """
    ranks = f"the process group of {step.world_size} ranks"
    try:
        within(step.timeout_s + FORMING_S, form, f"forming {ranks}", target.watch)
    except DistError as error:
        late = f"not formed within {step.timeout_s:g} s: a rank that was there before does not answer"
        raise refused("apply.group-not-formed", ranks, late) from error


def start_undo(step: StartProcessGroup, target: Target, started: bool) -> None:
    """Ends the group that this step started, and no other."""
    del step
    if started and world().running:
        target.ended += end_groups.end()


def _devices(backend: str) -> dict[str, str]:
    """Device type to backend of ``cpu:gloo,cuda:nccl``; a bare name stands under ``""``."""
    pairs = (part.rpartition(":") for part in backend.lower().split(","))
    return {device: name for device, _, name in pairs}


def _device(backend: str) -> LocalDevice | None:
    """The accelerator that a backend talks for, which must be the current one before the group starts; None: a CPU."""
    named = _devices(backend)
    if "" not in named:
        return next((LocalDevice(type=kind) for kind in named if kind != "cpu"), None)
    if named[""] in ("gloo", "mpi", "ucc", "fake"):
        return None
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return LocalDevice(type="cuda" if accelerator is None else accelerator.type)


def agree_ready(step: Agree, target: Target) -> problems.Problems:
    """Always: what the other ranks hold is not known before all of them are there."""
    del step, target
    return ()


def agree_do(step: Agree, target: Target) -> None:
    """One collective over the target's digests; raises on every rank alike."""
    del step
    from prepkit.ranks.agree import agree

    target.together()
    agree(target.digests, target.explain, target.judge)


def agree_undo(step: Agree, target: Target, memo: None) -> None:
    """Nothing was changed."""
    del step, target, memo


def mesh_ready(step: BuildMesh, target: Target) -> problems.Problems:
    """The axes must multiply to the world size, where that is known before the group starts."""
    del target
    ranks = prod(axis.size for axis in step.axes)
    shape = " x ".join(f"{axis.name}={axis.size}" for axis in step.axes)
    differs = world().running and ranks != world().size
    what = f"{shape} is for {ranks} ranks, the process group has {world().size}"
    return _other("mesh", what, "Build the plan again here." if differs else "") + launcher.device_problems(step.device)


def mesh_do(step: BuildMesh, target: Target) -> None:
    """Collective: one sub-group per row of every axis (torch ``init_device_mesh``)."""
    launcher.bind(LocalDevice(type=step.device))
    sizes, names = tuple(axis.size for axis in step.axes), tuple(axis.name for axis in step.axes)
    target.together()
    with group_limits.as_default_group():
        target.mesh = init_device_mesh(step.device, sizes, mesh_dim_names=names)


def mesh_undo(step: BuildMesh, target: Target, memo: None) -> None:
    """Forgets the mesh. Its sub-groups end with the default group; torch has no way to end them alone."""
    del step, memo
    target.mesh = None


START: Handler[StartProcessGroup, Target, bool] = Handler(ready=start_ready, do=start_do, undo=start_undo)
AGREE: Handler[Agree, Target, None] = Handler(ready=agree_ready, do=agree_do, undo=agree_undo)
MESH: Handler[BuildMesh, Target, None] = Handler(ready=mesh_ready, do=mesh_do, undo=mesh_undo)
