"""Replicas: every rank holds the whole model."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from prepkit.steps.common import LocalDevice


@frozen(kw_only=True)
class ConvertSyncBatchNorm:
    """Puts a ``SyncBatchNorm`` with the same parameters in the place of each batch norm. Fails if one is not there."""

    paths: tuple[str, ...]


@frozen(kw_only=True)
class PowerSGDOptions:
    """Arguments of torch's ``PowerSGDState``, under its names."""

    matrix_approximation_rank: int
    start_powerSGD_iter: int  # noqa: N815  # torch's name
    min_compression_rate: float
    use_error_feedback: bool
    warm_start: bool
    orthogonalization_epsilon: float
    random_seed: int
    batch_tensors_with_same_shape: bool


@frozen(kw_only=True)
class DDPCommHook:
    """A communication hook of torch by name; one with options gets a state made from them."""

    hook: Literal["fp16_compress_hook", "bf16_compress_hook", "powerSGD_hook"]
    wrapper: Literal["fp16_compress_wrapper", "bf16_compress_wrapper"] | None = None
    options: PowerSGDOptions | None = None


@frozen(kw_only=True)
class WrapDDP:
    """Wraps the model in ``DistributedDataParallel``. Fails if it is already wrapped or nothing is trainable."""

    device: LocalDevice | None
    """Gives ``device_ids``; None, or a CPU, gives none (a CPU model, or one that a device map spreads)."""
    broadcast_buffers: bool
    bucket_cap_mb: float
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    hook: DDPCommHook | None = None
    """Registered on the wrapper; None: gradients are reduced as they are."""
