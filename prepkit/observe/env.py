"""The environment that is here: launcher, devices, versions. Only ``observe`` reads them too."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from functools import cache
from importlib import metadata

import torch
from attrs import frozen

from prepkit.facts import Env
from prepkit.findings.text import in_bytes
from prepkit.ranks.launcher import LOCAL_RANK, PER_NODE, WORLD_SIZE, from_launcher
from prepkit.ranks.world import world

LIBRARIES = (
    "bitsandbytes",
    "deepspeed",
    "msamp",
    "peft",
    "safetensors",
    "torch_xla",
    "torchao",
    "transformer_engine",
    "transformers",
)
"""Optional libraries whose version changes what a plan may ask for. Looked up in their metadata, never imported."""

VARIABLES = (
    # accelerate's, which transformers reads deep inside from_pretrained as well
    "ACCELERATE_BYPASS_DEVICE_MAP",
    "ACCELERATE_DOWNCAST_BF16",
    "ACCELERATE_DYNAMO_BACKEND",
    "ACCELERATE_DYNAMO_MODE",
    "ACCELERATE_FP8_BACKEND",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_TORCH_DEVICE",
    "ACCELERATE_USE_CPU",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
    "DS_ACCELERATOR",
    "FSDP_CPU_RAM_EFFICIENT_LOADING",
    "FSDP_OFFLOAD_PARAMS",
    "FSDP_STATE_DICT_TYPE",
    "FSDP_VERSION",
    "PARALLELISM_CONFIG_CP_SIZE",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE",
    "PARALLELISM_CONFIG_SP_SIZE",
    "PARALLELISM_CONFIG_TP_SIZE",
    "PT_HPU_LAZY_MODE",
    # a Slurm job is often started with one variable and launched with another
    "SLURM_NTASKS",
    # torch's: whether and how it compiles, and which precision it multiplies in
    "NVIDIA_TF32_OVERRIDE",
    "TORCHDYNAMO_DISABLE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_COMPILE_DISABLE",
)
"""Environment variables that change what is prepared, and that hold no secret and no rank.

Left out on purpose: ``CUDA_VISIBLE_DEVICES`` and its kin, which launchers set per rank; ``NCCL_*``, ``TORCH_NCCL_*``,
``MASTER_ADDR`` and ``MASTER_PORT``, which change how fast and where, but not what.
"""


def observe_env() -> Env:
    """Return what is here. The same on every rank of a cluster whose nodes are alike.

    The world size is that of the running process group, else of the processes that torch_xla started, else what the
    launcher says, else 1. Initialises the driver of
    an accelerator, if one is there, to ask for memory and capability; allocates nothing on it.
    Raises ``ValueError`` if a launcher's variable is not a whole number above 0.
    """
    device = _device()
    return Env(
        world_size=world().size if world().running else _xla_processes() or from_launcher(WORLD_SIZE, 1) or 1,
        per_node=from_launcher(PER_NODE, 1),
        device=device.type,
        memory=device.memory,
        capability=device.capability,
        bf16=device.bf16,
        torch=str(torch.__version__),
        python=platform.python_version(),
        libraries=_libraries(),
        variables=tuple((name, os.environ[name]) for name in sorted(VARIABLES) if name in os.environ),
    )


def _xla_processes() -> int | None:
    """Number of processes that torch_xla started this one among; None where it did not. Imports nothing.

    torch_xla remembers its first answer, in forked processes too, so that it is asked only once it has started them.
    """
    runtime, core = sys.modules.get("torch_xla.runtime"), getattr(sys.modules.get("torch_xla"), "_XLAC", None)
    if runtime is None or core is None or not core._xla_get_replication_devices_count():
        return None
    return int(runtime.world_size())


def now() -> str:
    """The time in UTC, to the second, for what is kept; no plan has one."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def devices() -> tuple[str, ...]:
    """A line for each accelerator that this process sees, with its memory; or for the CPU."""
    if not torch.accelerator.is_available():
        return (f"cpu, {os.cpu_count()} cores, no accelerator",)
    kind = torch.accelerator.current_accelerator()
    name = kind.type if kind else "cpu"
    module = getattr(torch, name, None)
    told = getattr(module, "get_device_properties", None)
    lines = []
    for index in range(torch.accelerator.device_count()):
        properties = told(index) if told is not None else None
        memory = getattr(properties, "total_memory", None)
        size = "" if memory is None else f", {in_bytes(memory)}"
        lines.append(f"{name}:{index} {getattr(properties, 'name', '')}{size}".replace(" ,", ","))
    return tuple(lines)


@frozen(kw_only=True)
class _Device:
    """One accelerator, or the CPU."""

    type: str
    memory: int | None = None
    capability: tuple[int, int] | None = None
    bf16: bool | None = None


def _device() -> _Device:
    """The accelerator that this process would use: the one of its local rank where it sees several."""
    if not torch.accelerator.is_available():
        return _Device(type="cpu", bf16=True)  # every CPU kernel of torch has a bfloat16 form
    kind = torch.accelerator.current_accelerator()
    if kind is None or kind.type not in ("cuda", "xpu"):
        return _Device(type=kind.type if kind else "cpu")
    index = (from_launcher(LOCAL_RANK, 0) or 0) % torch.accelerator.device_count()
    if kind.type == "xpu":
        return _Device(type="xpu", memory=torch.xpu.get_device_properties(index).total_memory)
    return _Device(
        type="cuda",
        memory=torch.cuda.get_device_properties(index).total_memory,
        capability=None if torch.version.hip else torch.cuda.get_device_capability(index),
        bf16=torch.cuda.is_bf16_supported(including_emulation=False),
    )


@cache  # what is installed does not change under a running process
def _libraries() -> tuple[tuple[str, str], ...]:
    return tuple((name, version) for name in LIBRARIES if (version := _version(name)) is not None)


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None
