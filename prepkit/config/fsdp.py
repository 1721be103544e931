"""Shards: torch's ``fully_shard`` and ``FullyShardedDataParallel``."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from prepkit.config.precision import DType
from prepkit.config.wrapping import Wrap, WrapBlocks


@frozen(kw_only=True)
class OffloadToCPU:
    """Sharded parameters, gradients and optimizer state live in host memory (torch ``CPUOffloadPolicy``)."""

    pin_memory: bool = True
    """Page-lock the host copies. False saves host memory and makes the copies slower."""


Offload = OffloadToCPU | None
"""None: parameters, gradients and optimizer state stay on the compute device."""


@frozen(kw_only=True)
class FSDP2:
    """Parameters, gradients and optimizer state are sharded per parameter (torch ``fully_shard``).

    A model that ``fully_shard`` has cut before is left as it is, and has to be what this says (M2-1).
    """

    wrap: Wrap = WrapBlocks()
    """Which modules become units of their own, besides the root."""
    reshard_after_forward: bool | int = True
    """Free the gathered parameters of a unit after its forward. An int reshards to that many ranks instead.
    The root keeps its parameters, because backward begins with them."""
    offload: Offload = None
    """Where the shards live between uses. None: on the compute device."""
    ignored: tuple[str, ...] = ()
    """Shell patterns over dotted paths, as in ``WrapPaths``: modules whose parameters stay whole on every rank, and are
    not cast. Gradients of trained ones are averaged. A parameter without dimensions stays whole in any case."""
    cast_forward_inputs: bool = True
    """Cast the floating inputs of every unit to the compute dtype of ``precision``. False for a model that casts them
    by itself, or wants some of them in float32 (torch ``MixedPrecisionPolicy``)."""
    reduce_unused: bool = False
    """Reduce zeros for a trained parameter that gets no gradient on a rank, where ranks use other parameters, as in
    lists of experts. One that no rank uses gets a gradient of zeros too, and is stepped
    (``FSDPModule.set_reduce_scatter_unused_params`` of torch 2.13)."""


Sharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]


@frozen(kw_only=True)
class FSDP1:
    """The parameters of a unit are laid end to end and cut evenly (torch ``FullyShardedDataParallel``)."""

    wrap: Wrap = WrapBlocks()
    """Which modules become units of their own, besides the root. Under ``BF16`` every batch norm becomes one too."""
    sharding: Sharding = "FULL_SHARD"
    """torch's ``ShardingStrategy``. ``SHARD_GRAD_OP`` keeps a unit gathered between forward and backward, ``NO_SHARD``
    always; ``HYBRID_*`` shard inside each copy of the model, and need a mesh of copies and shards."""
    offload: bool = False
    """Shards, their gradients and optimizer state live in host memory (torch ``CPUOffload``)."""
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"] = "BACKWARD_PRE"
    """Gather the next unit of backward before or after the gradients of the current one; ``NO_PREFETCH``: when it
    is needed."""
    forward_prefetch: bool = False
    """Gather the next unit of forward before the present one has run; for models that always run in one order."""
    limit_all_gathers: bool = True
    """Let the CPU run at most two units ahead, which bounds what is gathered at once."""
    use_orig_params: bool = True
    """Keep the parameters, as views of the flat one. False leaves one flat parameter per unit to the optimizer."""
    sync_module_states: bool = False
    """Broadcast the parameters and buffers of rank 0 before sharding; on an accelerator only."""
    ignored: tuple[str, ...] = ()
    """Shell patterns over dotted paths, as in ``WrapPaths``: modules that stay whole, and that nobody averages."""
    cast_forward_inputs: bool = False
    """Cast the floating inputs of every unit below the root to the compute dtype (torch ``MixedPrecision``)."""
    cast_root_forward_inputs: bool = True
    """The same for the root, whose inputs are the model's."""
    buffer_dtype: DType | None = None
    """Dtype to which ``BF16`` casts floating buffers; None leaves them as they are stored."""
