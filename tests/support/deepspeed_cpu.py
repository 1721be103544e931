"""DeepSpeed as the tests use it: on the CPU, and without the kernel that takes longest to compile."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path


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
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR", get_default_build_root()))
    return any(root.glob(f"**/{name}/{name}.so")) or bool(os.environ.get("PREPKIT_BUILD_OPS"))
