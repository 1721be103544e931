"""Whole copies that average their gradients, and how the gradients travel."""

from __future__ import annotations

from typing import Literal

from attrs import frozen


@frozen(kw_only=True)
class CompressHook:
    """DDP casts gradients before they are reduced (torch ``fp16_compress_hook`` and ``bf16_compress_hook``)."""

    dtype: Literal["float16", "bfloat16"] = "bfloat16"
    """What travels. bfloat16 needs NCCL or XCCL."""


@frozen(kw_only=True)
class PowerSGDHook:
    """DDP reduces low-rank approximations of the gradients (torch ``powerSGD_hook``)."""

    rank: int = 1
    """Rank of the approximation, at least 1: higher is closer and sends more."""
    start_iter: int = 1000
    """Number of steps that are reduced plainly first; at least 2 with error feedback or warm start."""
    min_compression_rate: float = 2.0
    """Above 0. A tensor that would shrink by less is reduced whole."""
    use_error_feedback: bool = True
    """Add what the approximation lost to the next gradient. False loses it."""
    warm_start: bool = True
    """Begin each approximation with the last one. False begins with random values."""
    orthogonalization_epsilon: float = 0.0
    """Added to norms; above 0 it prevents a division by 0 of gradients that are all 0."""
    random_seed: int = 0
    """Seed of the first approximation, the same on every rank."""
    batch_tensors_with_same_shape: bool = False
    """Compress tensors of one shape together."""
    wrapper: Literal["none", "float16", "bfloat16"] = "none"
    """Dtype to cast to before PowerSGD sees the gradients (torch ``fp16_compress_wrapper``); bfloat16 needs NCCL."""


CommHook = CompressHook | PowerSGDHook | None
"""None: DDP reduces the gradients as they are."""


@frozen(kw_only=True)
class DDP:
    """Every rank holds the whole model; gradients are averaged over all ranks (torch ``DistributedDataParallel``)."""

    broadcast_buffers: bool = True
    """Broadcast buffers from rank 0 at the start of every forward. False leaves each rank its own."""
    bucket_cap_mb: float = 25.0
    """Size of a gradient bucket in MiB."""
    find_unused_parameters: bool = False
    """Walk the graph after every forward for parameters that get no gradient. Slower; False unless some do not."""
    gradient_as_bucket_view: bool = True
    """Gradients alias the buckets. False keeps a second copy of every gradient (torch's own default)."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order."""
    hook: CommHook = None
    """What is done to gradients on their way to the other ranks. None: they are reduced as they are."""
    sync_batchnorm: bool = False
    """Batch normalisation over the batches of all ranks (torch ``SyncBatchNorm``), which needs an accelerator."""
