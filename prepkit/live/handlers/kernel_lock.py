"""A lock that a killed compilation has left behind, for which torch would wait for ever without a word.

DeepSpeed compiles its kernels when they are first needed, through torch's ``cpp_extension.load``. Whoever compiles
creates a file ``lock`` in the kernel's folder and removes it at the end; everybody else, also where the kernel has long
been compiled, waits until the file is gone (torch ``utils/file_baton.py``). A builder that is killed never removes it,
and the wait holds the interpreter, so that no timeout of Python's ends it either.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from prepkit.live.ranks import launcher

PROCESSES = Path("/proc")
"""Where Linux shows which process has which files open."""

LONGEST_BUILD_S = 600.0
"""Seconds after which a lock is taken for a stale one where nobody can tell who holds it. A kernel takes one or two
minutes to compile."""


def stale_locks(kernels: Iterable[str]) -> tuple[Path, ...]:
    """The lock files of these kernels that no living process holds."""
    locks = [launcher.extensions_root() / kernel / "lock" for kernel in dict.fromkeys(kernels)]
    return tuple(lock for lock in locks if _is_stale(lock))


def lock_problems(kernels: Iterable[str]) -> tuple[str, ...]:
    """One text for every stale lock, with what to type."""
    return tuple(
        f"{lock}: left by a compilation that was killed, DeepSpeed would wait for it for ever; unless another machine "
        f"is compiling in this folder now, type rm {lock}"
        for lock in stale_locks(kernels)
    )


def _is_stale(lock: Path) -> bool:
    try:
        created = lock.stat().st_mtime
    except OSError:  # there is none, or its builder has just removed it
        return False
    if (PROCESSES / "self" / "fd").is_dir():
        return not _is_open(lock) and lock.exists()  # its builder may have ended while we looked
    return time.time() - created > LONGEST_BUILD_S


def _is_open(file: Path) -> bool:
    """Whether a process of this machine has the file open, as the builder has its lock."""
    file = file.resolve()
    for descriptor in PROCESSES.glob("[0-9]*/fd/*"):
        try:
            if descriptor.readlink() == file:
                return True
        except OSError:  # it has ended, or belongs to somebody else, who does not write into our folder
            continue
    return False
