"""What the launcher gave this process, and the device that follows from it.

Beside ``observe`` the only file that reads environment variables: a plan never mentions a rank, so what depends on the
rank is bound here, when a handler acts.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from attrs import frozen
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not exported for checkers

from prepkit.steps import LocalDevice

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torch's ``env://`` rendezvous reads (torch ``distributed/rendezvous.py``)."""


@frozen(kw_only=True)
class Launch:
    """The variables of ``VARIABLES`` as they are set; None for those that are not."""

    rank: str | None
    world_size: str | None
    missing: tuple[str, ...]

    @property
    def launched(self) -> bool:
        """Whether a launcher has set anything at all."""
        return len(self.missing) < len(VARIABLES)


def launch() -> Launch:
    """What the environment says now."""
    missing = tuple(name for name in VARIABLES if not os.environ.get(name))
    return Launch(rank=os.environ.get("RANK"), world_size=os.environ.get("WORLD_SIZE"), missing=missing)


def processes() -> int:
    """How many processes the launcher has started; 1 where it has not said all that torch's rendezvous needs."""
    launched = launch()
    return 1 if launched.missing else int(launched.world_size or 1)


def place() -> tuple[int, int]:
    """Rank and number of processes, as the launcher has set them. Raises ``ValueError`` where it has not."""
    launched = launch()
    return int(launched.rank or ""), int(launched.world_size or "")


def meeting_place(timeout_s: float) -> tuple[Store, int, int]:
    """Store, rank and number of ranks of torch's ``env://`` rendezvous: what ``init_process_group`` would open itself.

    Rank 0 serves the store, unless the launcher does (torchrun), and waits until all ranks are connected.
    Raises ``torch.distributed.DistError`` where they are not after ``timeout_s`` seconds.
    """
    limit = timedelta(seconds=timeout_s)
    meeting: tuple[Store, int, int] = next(dist.rendezvous("env://", timeout=limit))  # type: ignore[attr-defined]  # public, not exported
    meeting[0].set_timeout(limit)
    return meeting


def local_rank() -> int:
    """``LOCAL_RANK``; without it the rank, which is right on one node; 0 for a process on its own."""
    rank = dist.get_rank() if dist.is_initialized() else int(launch().rank or 0)
    return dist.get_node_local_rank(fallback_rank=rank)


def name_local_rank() -> None:
    """Sets ``LOCAL_RANK`` where no launcher has: DeepSpeed reads it from the environment, ZeRO-3 in every forward."""
    os.environ.setdefault("LOCAL_RANK", str(local_rank()))


@contextmanager
def same_local_rank() -> Iterator[None]:
    """Afterwards ``LOCAL_RANK`` is what it was: a rehearsal plays a rank that this process does not have."""
    before = os.environ.get("LOCAL_RANK")
    try:
        yield
    finally:
        os.environ.pop("LOCAL_RANK", None)
        if before is not None:
            os.environ["LOCAL_RANK"] = before


def compiler_problems() -> tuple[str, ...]:
    """Why torch could not compile an extension here (torch ``utils/cpp_extension.py``); empty when it could."""
    compiler = os.environ.get("CXX") or "c++"
    if missing := [name for name in (compiler, "ninja") if shutil.which(name) is None]:
        return (f"{' and '.join(missing)}: not on PATH, and DeepSpeed compiles what it runs on the CPU; install it",)
    return ()


def extensions_root() -> Path:
    """The folder in which torch keeps compiled extensions, one folder each (torch ``_get_build_directory``)."""
    if chosen := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen)
    from torch.utils.cpp_extension import get_default_build_root

    if torch.version.hip is not None:
        built_for = f"rocm{torch.version.hip.replace('.', '')}"
    else:
        built_for = "cpu" if torch.version.cuda is None else f"cu{torch.version.cuda.replace('.', '')}"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return Path(get_default_build_root()) / f"{python}_{built_for}"


def device_problems(kind: str) -> tuple[str, ...]:
    """Why this process has no device of that type of its own; empty when it has one."""
    if kind in ("cpu", "meta"):
        return ()
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:
        return (f"torch has no device type {kind!r}; it has {_device_types()}",)
    if not module.is_available():
        return (f"device type {kind!r} is not available here; plan with device={_device_types()}",)
    count, index = module.device_count(), local_rank()
    if 1 < count <= index:
        return (f"local rank {index} has no {kind} device: {count} are visible; start at most {count} processes here",)
    return ()


def bind(device: LocalDevice) -> torch.device:
    """The device of this rank, made the current one of its type.

    Where a launcher shows each process one device only, that device is index 0, whatever the local rank (G-25).
    """
    if device.type in ("cpu", "meta"):
        return torch.device(device.type)
    module = torch.get_device_module(device.type)
    index = local_rank() if module.device_count() > 1 else 0
    module.set_device(index)
    return torch.device(device.type, index)


def _device_types() -> str:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return repr("cpu" if accelerator is None else accelerator.type)
