"""Flat units."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from prepkit.steps.common import LocalDevice


@frozen(kw_only=True)
class FlatUnit:
    """One ``FullyShardedDataParallel`` around a module."""

    path: str
    """Module path; ``""`` is the root."""
    full_precision: bool = False
    """Computes and keeps its buffers in float32, and takes inputs as they come: a batch norm."""


@frozen(kw_only=True)
class WrapFSDP1:
    """Wraps each unit in ``FullyShardedDataParallel``, in this order; the root comes last.

    Has no way back: the model has to be built again if a later step fails.
    Fails if a unit is wrapped already, a container without forward, or a parameter is one that torch cannot flatten.
    """

    units: tuple[FlatUnit, ...]
    sharding: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
    device: LocalDevice
    """Where the units compute; modules that lie on the CPU are moved there, ignored ones too."""
    param_dtype: str | None
    """Dtype of the gathered parameters; None: as stored."""
    reduce_dtype: str | None
    """Dtype of the gradient reduction; None: that of the gathered parameters."""
    buffer_dtype: str | None
    """Dtype of floating buffers; None: as stored."""
    offload: bool
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST"] | None
    forward_prefetch: bool
    limit_all_gathers: bool
    use_orig_params: bool
    sync_module_states: bool
    ignored: tuple[str, ...]
    """Paths of the modules that stay whole."""
    cast_forward_inputs: bool = False
    """Whether units below the root cast their floating inputs to ``param_dtype``."""
    cast_root_forward_inputs: bool = True
    allocates: bool = False
    """Gives storage to what is on meta, unit by unit before each is flattened; a later step gives it values."""


@frozen(kw_only=True)
class RegroupOptimizer:
    """Puts into every group the flat parameters that now hold its parameters, and joins their existing state.

    Fails if the parameters of one unit are not in one group, or their states cannot be joined.
    """

    slots: tuple[tuple[str, ...], ...]
    """As in ``ReleaseOptimizer``."""
