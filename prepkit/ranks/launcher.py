"""The launcher's variables for this process, and the device that follows from them.

Beside ``observe`` the only file that reads environment variables: a plan never mentions a rank, so what depends on the
rank is bound here, when a handler acts.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from attrs import frozen

from prepkit.findings import Finding
from prepkit.ranks.world import world
from prepkit.rules import found
from prepkit.steps import LocalDevice

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torch's ``env://`` rendezvous reads (torch ``distributed/rendezvous.py``)."""

WORLD_SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Number of processes, by launcher: torchrun, Open MPI, MPICH and Intel MPI, MVAPICH; the first that is set counts."""

PER_NODE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE")
"""Processes on this node, likewise."""

RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")
"""This process among all, likewise."""

LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK")
"""This process on its node, likewise."""

PORT = "29500"
"""Where the ranks of one node meet that mpirun has started without ``MASTER_PORT``; torch's own default."""


def from_launcher(names: tuple[str, ...], least: int) -> int | None:
    """The first of these variables that is set; None if none is. ``ValueError`` if it is no number >= ``least``."""
    for name in names:
        if (text := os.environ.get(name)) is not None:
            if not (text.strip().isdecimal() and len(text) < _DIGITS) or int(text) < least:
                raise ValueError(
                    f"environment variable {name} is {text!r:.60}, and should be a whole number of at least {least}; "
                    f"start with torchrun, which sets it, or type: unset {name}"
                )
            return int(text)
    return None


_DIGITS = 19
"""A number of processes has fewer digits; one of thousands would not even be read."""


@frozen(kw_only=True)
class Launch:
    """Values of ``VARIABLES`` by a launcher, from its own variables or those of MPI; None where unset."""

    rank: str | None
    world_size: str | None
    address: str | None
    port: str | None
    by_mpi: bool = False
    """True if rank and number of ranks are those of MPI: torch's ``env://`` would not find them."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Which of ``VARIABLES`` are not known."""
        known = (self.rank, self.world_size, self.address, self.port)
        return tuple(name for name, value in zip(VARIABLES, known, strict=True) if not value)

    @property
    def launched(self) -> bool:
        """True if a launcher has set anything at all."""
        return len(self.missing) < len(VARIABLES)


def launch() -> Launch:
    """Read the environment as it is now.

    mpirun sets neither address nor port. On one node the ranks meet at ``localhost``; on several the address has to be
    passed on. One process that mpirun has started is on its own.
    """
    said = {name: os.environ.get(name) or None for name in VARIABLES}
    by_mpi = said["RANK"] is None and said["WORLD_SIZE"] is None and from_launcher(RANK[1:], 0) is not None
    world = from_launcher(WORLD_SIZE[1:], 1) if by_mpi else None
    if world is None or world == 1:
        address, port = said["MASTER_ADDR"], said["MASTER_PORT"]
        return Launch(rank=said["RANK"], world_size=said["WORLD_SIZE"], address=address, port=port)
    one_node = from_launcher(PER_NODE, 1) == world
    return Launch(
        rank=str(from_launcher(RANK[1:], 0)),
        world_size=str(world),
        address=said["MASTER_ADDR"] or ("localhost" if one_node else None),
        port=said["MASTER_PORT"] or PORT,
        by_mpi=True,
    )


def processes() -> int:
    """Number of processes that the launcher started; 1 where it did not set all that torch's rendezvous needs."""
    launched = launch()
    return 1 if launched.missing else int(launched.world_size or 1)


def place() -> tuple[int, int]:
    """Rank and number of processes, as the launcher has set them. Raises ``ValueError`` where it has not."""
    launched = launch()
    return int(launched.rank or ""), int(launched.world_size or "")


def rank() -> int:
    """The rank in the running group, else what the launcher has set, else 0."""
    return world().rank if world().running else int(launch().rank or 0)


def is_main() -> bool:
    """True in the one process that reports and writes for all, also before there is a group."""
    return rank() == 0


@frozen(kw_only=True)
class Address:
    """Where the ranks of a launch have their store, and who this process is there."""

    host: str
    port: int
    rank: int
    world: int
    served: bool
    """True if the launcher serves the store, as torchrun does; else rank 0 does."""
    attempt: str
    """Of a launcher that starts the processes again after a failure."""
    libuv: bool


def address() -> Address:
    """As torch's ``env://`` rendezvous reads it (``distributed/rendezvous.py``), or MPI has said.

    Raises ``ValueError`` where something is no number.
    """
    launched, (mine, world) = launch(), place()
    return Address(
        host=launched.address or "",
        port=int(launched.port or ""),
        rank=mine,
        world=world,
        served=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        libuv=os.environ.get("USE_LIBUV", "1") == "1",
    )


def local_rank() -> int:
    """``LOCAL_RANK``, or MPI's; without either the rank, which is right on one node; 0 for a process on its own."""
    said = from_launcher(LOCAL_RANK, 0)
    return rank() if said is None else said


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


def compiler_problems() -> tuple[Finding, ...]:
    """Why torch could not compile an extension here (torch ``utils/cpp_extension.py``); empty when it could."""
    compiler = os.environ.get("CXX") or "c++"
    missing = [name for name in (compiler, "ninja") if shutil.which(name) is None]
    what = "not on PATH, and DeepSpeed compiles what it runs on the CPU"
    return (found("deepspeed.compiler", " and ".join(missing), what),) if missing else ()


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


def device_problems(kind: str) -> tuple[Finding, ...]:
    """Why this process has no device of that type of its own; empty when it has one."""
    if kind in ("cpu", "meta"):
        return ()
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:
        return (_no_device(kind, f"torch has no such device type; it has {_device_types()}"),)
    if not module.is_available():
        return (_no_device(kind, "not available here", f"Plan with device={_device_types()}."),)
    count, index = module.device_count(), local_rank()
    if 1 < count <= index:
        what = f"{count} are visible, and there is none for local rank {index}"
        return (_no_device(kind, what, f"Start at most {count} processes here."),)
    return ()


def _no_device(kind: str, what: str, fix: str = "") -> Finding:
    return found("environment.device", f"device {kind!r}", what, fix)


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
