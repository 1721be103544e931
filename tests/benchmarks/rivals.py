"""The same work done by accelerate and by transformers, on the CPU. accelerate comes with the extra ``bench``."""

from __future__ import annotations

import importlib.util
import os
from typing import Any


def has_accelerate() -> bool:
    """Whether there is something to compare with."""
    return importlib.util.find_spec("accelerate") is not None


def accelerator(*, ram_efficient: bool) -> Any:
    """An ``Accelerator`` for FSDP2. On a CPU it would silently take DDP, so that the type is put into its state."""
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=ram_efficient,
        reshard_after_forward=True,
    )
    made = Accelerator(cpu=True, fsdp_plugin=plugin)
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    return made


def transformers_native(folder: str, ranks: int) -> Any:
    """``from_pretrained`` that shards while it reads (transformers >= 5)."""
    import torch
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    return LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=DistributedConfig(fsdp_size=ranks)
    )
