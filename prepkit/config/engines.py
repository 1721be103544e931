"""The engines and the mesh of ranks: whole copies, shards, parts of layers, DeepSpeed's ZeRO."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen

from prepkit.config.blocks import Wrap, WrapBlocks
from prepkit.config.precision import DType


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


def _json_text(given: str | Mapping[str, Any]) -> str:
    """Text as it is; a mapping as JSON text, so that the caller's own is never kept, and never changed."""
    return given if isinstance(given, str) else json.dumps(given)


@frozen(kw_only=True)
class Schedule:
    """Numbers for the values that a DeepSpeed ``scheduler`` section leaves ``"auto"``."""

    warmup_steps: int = 0
    """``warmup_num_steps``: optimizer steps until the full learning rate."""
    total_steps: int | None = None
    """``total_num_steps``: optimizer steps of the whole run."""
    min_lr: float = 0.0
    """``warmup_min_lr``."""
    max_lr: float | None = None
    """``warmup_max_lr``. None: the learning rate of the optimizer."""


@frozen(kw_only=True)
class DeepSpeed:
    """DeepSpeed holds the model: ZeRO shards optimizer state (1), gradients too (2), parameters too (3)."""

    stage: int | None = None
    """ZeRO stage, 0 to 3. None: that of ``config``, else 2."""
    offload_optimizer: Literal["none", "cpu", "nvme"] | None = None
    """Where optimizer state lives. None: as ``config`` says, else with the parameters."""
    offload_param: Literal["none", "cpu", "nvme"] | None = None
    """Where the shards of parameters live, at stage 3. None: as ``config`` says, else on the device."""
    micro_batch: int | None = None
    """Samples per rank and micro-batch. None: as ``config`` says, else that of the loaders."""
    micro_batch_of: Literal["smallest", "largest"] = "smallest"
    """Which loader counts where several have different batch sizes."""
    leaf_modules: tuple[str, ...] = ()
    """Classes whose modules ZeRO-3 gathers whole, such as a mixture of experts that picks experts by the data."""
    schedule: Schedule | None = None
    """Numbers for the ``scheduler`` section of ``config``."""
    config: str = field(default="{}", converter=_json_text)
    """DeepSpeed's own config as JSON text, or a mapping, which is copied. ``"auto"`` values are worked out."""


@frozen(kw_only=True)
class TensorParallel:
    """Single layers are cut over all ranks, which read the same batch (torch ``parallelize_module``).

    ``config.tp_plan`` says how. For shards or copies beside it write ``FSDP2()`` with ``Mesh(tensor=...)``.
    """


ActivationLayout = Literal["replicate", "features", "heads", "sequence"]
"""How an activation is cut over the tensor ranks: not, in its last dimension, in its last but one, in dimension 1."""


@frozen
class TPLayer:
    """How the modules at some paths are cut."""

    pattern: str
    """Shell pattern over dotted module paths; ``*`` stays inside one path segment."""
    style: Literal["colwise", "rowwise", "sequence", "replicate"]
    """``colwise`` cuts the outputs of a linear layer or the columns of an embedding, ``rowwise`` the inputs, or the
    vocabulary. ``sequence`` and ``replicate`` keep the weights whole, and work on a part of the sequence, or on all."""
    input_layout: ActivationLayout | None = None
    """How the input arrives. None: ``features`` for a rowwise linear layer, ``sequence`` for sequence, else
    ``replicate``."""
    output_layout: ActivationLayout | None = None
    """How the output leaves. None: ``features`` for colwise, ``sequence`` for sequence, else ``replicate``."""


@frozen(kw_only=True)
class TPPlanFromModel:
    """The model's own plan: its ``tp_plan``, or the ``base_model_tp_plan`` of its config (transformers)."""


@frozen
class TPPlan:
    """A plan by hand. Modules that no row names are left as they are, and every tensor rank computes all of them."""

    layers: tuple[TPLayer, ...]
    """No module may be named by two rows."""


TensorParallelPlan = TPPlanFromModel | TPPlan


@frozen(kw_only=True)
class Mesh:
    """How the ranks are laid out: ``replicate`` copies of ``shard`` shards of layers that are cut in ``tensor`` parts.

    ``-1`` means "the rest", once. Ranks that differ in ``tensor`` only are neighbours, and read the same batch.
    """

    replicate: int = 1
    """Number of copies of the model. Above 1 with shards above 1 it is HSDP."""
    shard: int = -1
    """Number of shards that one copy is split into."""
    tensor: int = 1
    """Number of ranks that each layer named in ``config.tp_plan`` is cut over."""


@frozen(kw_only=True)
class AxisTraits:
    """What the rest of prepkit asks of an axis of the mesh."""

    name: str
    """A field of ``Mesh``, and the name of the axis in plans and in torch's ``DeviceMesh``."""
    same_data: bool = False
    """Ranks that differ on this axis only read the same samples."""


AXES: tuple[AxisTraits, ...] = (
    AxisTraits(name="replicate"),
    AxisTraits(name="shard"),
    AxisTraits(name="tensor", same_data=True),
)
"""One row for each field of ``Mesh``, the slowest axis first: ranks that are neighbours differ on the last."""

SAME_DATA = frozenset(axis.name for axis in AXES if axis.same_data)
"""Names of the axes whose ranks read the same samples."""
