"""DeepSpeed as the tests use it: on the CPU, in its own folder, without the kernel that takes longest to compile."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def own_extensions() -> None:
    """Compiled kernels stay in a folder of this environment, which outlives the session, and no stale lock in them.

    To be called once, before a session starts its processes, which inherit the folder. A folder for each session would
    compile again: a minute or two for a kernel. The user's own folder would hang on a lock that others have left, and
    leave one there.
    """
    root = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions")))
    if kernels := [lock.parent.name for lock in root.glob("*/lock")]:  # else nothing heavy is imported here
        from prepkit.applying.handlers.deepspeed import stale_locks

        for lock in stale_locks(kernels):
            lock.unlink(missing_ok=True)


def lean() -> None:
    """To be called before a process's first use of DeepSpeed; later calls change nothing.

    Its shared-memory kernel is compiled whenever a process group meets it, and serves inference only.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def kernel_built(name: str) -> bool:
    """Whether DeepSpeed is here and has compiled this kernel before, or may now: it takes a minute or two, once."""
    if importlib.util.find_spec("deepspeed") is None:
        return False
    from prepkit.ranks import launcher

    return (launcher.extensions_root() / name / f"{name}.so").exists() or bool(os.environ.get("PREPKIT_BUILD_OPS"))
