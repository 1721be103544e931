"""What the user asked for: a frozen ``Config`` and the unions of choices inside it.

Nothing here reads the environment or resolves a default from the machine: what is not said here is decided by
the planner, from facts, and the plan gives the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal

from attrs import field, frozen

from prepkit.config_fp8 import MSAMP as MSAMP
from prepkit.config_fp8 import DelayedScaling as DelayedScaling
from prepkit.config_fp8 import FP8Backend as FP8Backend
from prepkit.config_fp8 import MXFP8BlockScaling as MXFP8BlockScaling
from prepkit.config_fp8 import TorchAO as TorchAO
from prepkit.config_fp8 import TransformerEngine as TransformerEngine

DType = Literal["float32", "bfloat16", "float16"]


class Intent(StrEnum):
    """What the prepared model is for. Given, never guessed from the arguments (pain 19)."""

    TRAINING = "training"
    INFERENCE = "inference"


# --- which modules -------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class WrapBlocks:
    """The classes that the model declares in ``_no_split_modules``; where it declares none, its repeated blocks.

    A repeated block is an item of a ``ModuleList`` or ``Sequential`` of at least two items, all of one class.
    A module that holds some names of a tied parameter and not the others is left to the root: the tie stays whole.
    """


@frozen
class WrapClasses:
    """Every module whose class has one of these names; exact text, subclasses do not match (behaviour G-60)."""

    names: tuple[str, ...]
    """Class names, such as ``("LlamaDecoderLayer",)``."""


@frozen
class WrapPaths:
    """Every module whose dotted path matches one of these patterns."""

    patterns: tuple[str, ...]
    """Shell patterns over dotted paths, such as ``("model.layers.*",)``; ``*`` stays inside one path segment."""


@frozen
class WrapSize:
    """Every module, leaves first, that still owns at least this many parameters once its own units are taken out."""

    min_params: int
    """Number of elements, at least 1."""


@frozen(kw_only=True)
class WrapRoot:
    """No module of its own: the root is the only unit, and the whole model is gathered at once."""


Wrap = WrapBlocks | WrapClasses | WrapPaths | WrapSize | WrapRoot


# --- engines -------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Single:
    """One process, one device, no wrapper."""


@frozen(kw_only=True)
class NoHook:
    """DDP reduces the gradients as they are."""


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


CommHook = NoHook | CompressHook | PowerSGDHook


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
    hook: CommHook = NoHook()
    """What is done to gradients on their way to the other ranks."""
    sync_batchnorm: bool = False
    """Batch normalisation over the batches of all ranks (torch ``SyncBatchNorm``), which needs an accelerator."""


@frozen(kw_only=True)
class KeepOnDevice:
    """Parameters, gradients and optimizer state stay on the compute device."""


@frozen(kw_only=True)
class OffloadToCPU:
    """Sharded parameters, gradients and optimizer state live in host memory (torch ``CPUOffloadPolicy``)."""

    pin_memory: bool = True
    """Page-lock the host copies. False saves host memory and makes the copies slower."""


Offload = KeepOnDevice | OffloadToCPU


@frozen(kw_only=True)
class FSDP2:
    """Parameters, gradients and optimizer state are sharded per parameter (torch ``fully_shard``)."""

    wrap: Wrap = WrapBlocks()
    """Which modules become units of their own, besides the root."""
    reshard_after_forward: bool | int = True
    """Free the gathered parameters of a unit after its forward. An int reshards to that many ranks instead.
    The root keeps its parameters, because backward begins with them."""
    offload: Offload = KeepOnDevice()
    """Where the shards live between uses."""


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
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST"] | None = "BACKWARD_PRE"
    """Gather the next unit of backward before or after the gradients of the present one; None: when it is needed."""
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
    buffer_dtype: DType | None = None
    """Dtype to which ``BF16`` casts floating buffers; None leaves them as they are stored."""


@frozen(kw_only=True)
class TensorParallel:
    """Single layers are cut over all ranks, which read the same batch (torch ``parallelize_module``).

    ``config.tensor`` says how. For shards or copies beside it write ``FSDP2()`` with ``Mesh(tensor=...)``.
    """


@frozen(kw_only=True)
class XLA:
    """Every process holds the whole model on its XLA device, such as a TPU core (behaviour XL-1, XL-2, PR-11)."""

    forked: bool = False
    """The processes were forked (``torch_xla.launch(start_method="fork")``); torch_xla has a wrapper for their move."""


Engine = Single | DDP | FSDP2 | FSDP1 | TensorParallel | XLA | DeepSpeed


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
    """Number of ranks that each layer named in ``config.tensor`` is cut over."""


# --- tensor parallel -----------------------------------------------------------------------------------------------

Activation = Literal["whole", "features", "heads", "sequence"]
"""How an activation is cut over the tensor ranks: not, in its last dimension, in its last but one, in dimension 1."""


@frozen
class TensorRow:
    """How the modules at some paths are cut."""

    pattern: str
    """Shell pattern over dotted module paths; ``*`` stays inside one path segment."""
    style: Literal["colwise", "rowwise", "sequence", "replicate"]
    """``colwise`` cuts the outputs of a linear layer or the columns of an embedding, ``rowwise`` the inputs, or the
    vocabulary. ``sequence`` and ``replicate`` keep the weights whole, and work on a part of the sequence, or on all."""
    takes: Activation | None = None
    """How the input arrives. None: ``features`` for a rowwise linear layer, ``sequence`` for sequence, else whole."""
    gives: Activation | None = None
    """How the output leaves. None: ``features`` for colwise, ``sequence`` for sequence, else whole."""


@frozen(kw_only=True)
class TensorFromModel:
    """The model's own plan: its ``tp_plan``, or the ``base_model_tp_plan`` of its config (transformers)."""


@frozen
class TensorRows:
    """A plan by hand. Modules that no row names are left as they are, and every tensor rank computes all of them."""

    rows: tuple[TensorRow, ...]
    """No module may be named by two rows."""


TensorPlan = TensorFromModel | TensorRows


# --- precision, compile, checkpointing -----------------------------------------------------------------------------


@frozen(kw_only=True)
class AsStored:
    """Compute in the dtype that each parameter is stored in; nothing is cast (accelerate's ``no``)."""


@frozen(kw_only=True)
class BF16:
    """Compute in bfloat16; outputs come back in float32."""

    reduce_dtype: DType = "float32"
    """Dtype of the gradient reduction under FSDP2. DDP reduces in the dtype of the parameters."""
    output_dtype: DType = "float32"
    """Dtype of the model's floating outputs."""
    master_weights: bool = True
    """Store trainable parameters in float32, so that small updates are not rounded away. Frozen ones are untouched."""


@frozen(kw_only=True)
class FP8:
    """Linear layers multiply in float8; everything else is as in ``BF16`` (behaviour ST-21, H-20)."""

    backend: FP8Backend = TorchAO()
    """Which library. Never chosen by what happens to be installed or set in the environment."""
    reduce_dtype: DType = "float32"
    """As in ``BF16``."""
    output_dtype: DType = "float32"
    """As in ``BF16``."""
    master_weights: bool = True
    """As in ``BF16``."""


@frozen(kw_only=True)
class FP16:
    """Compute in float16 with a scaled loss; outputs come back in float32. Needs an accelerator.

    prepkit scales the loss, unscales before it clips, and skips a step whose gradients overflowed
    (torch ``GradScaler``; ``ready.skipped`` tells).
    """

    reduce_dtype: DType = "float32"
    """As in ``BF16``."""
    output_dtype: DType = "float32"
    """As in ``BF16``."""
    master_weights: bool = True
    """As in ``BF16``. Without it float16 weights cannot be trained: their gradients cannot be unscaled."""
    init_scale: float = 65536.0
    """What the loss is multiplied with at first; above 0."""
    growth_factor: float = 2.0
    """What the scale is multiplied with after ``growth_interval`` steps without overflow; above 1."""
    backoff_factor: float = 0.5
    """What the scale is multiplied with after an overflow; between 0 and 1."""
    growth_interval: int = 2000
    """Number of steps without overflow before the scale grows; at least 1."""


Precision = AsStored | BF16 | FP16 | FP8

Mixed = BF16 | FP16 | FP8
"""Precisions that compute in another dtype than they store, for ``isinstance``."""


@frozen(kw_only=True)
class NoCompile:
    """Run eagerly."""


@frozen(kw_only=True)
class CompileModel:
    """Compile the whole model."""

    backend: str = "inductor"
    """A backend that ``torch.compile`` knows."""
    mode: str = "default"
    """``default``, ``reduce-overhead``, ``max-autotune`` or ``max-autotune-no-cudagraphs``."""
    fullgraph: bool = False
    """Refuse graph breaks."""
    dynamic: bool | None = None
    """Compile for dynamic shapes; None lets torch decide."""


@frozen(kw_only=True)
class CompileBlocks:
    """Compile each repeated block by itself: one compilation serves all of them."""

    blocks: Wrap = WrapBlocks()
    """Which modules."""
    backend: str = "inductor"
    """A backend that ``torch.compile`` knows."""
    mode: str = "default"
    """As in ``CompileModel``."""
    fullgraph: bool = False
    """Refuse graph breaks."""
    dynamic: bool | None = None
    """Compile for dynamic shapes; None lets torch decide."""


Compile = NoCompile | CompileModel | CompileBlocks


@frozen(kw_only=True)
class NoCheckpointing:
    """Keep all activations."""


@frozen(kw_only=True)
class CheckpointBlocks:
    """Recompute each block's activations in backward (torch ``checkpoint_wrapper``, non-reentrant)."""

    blocks: Wrap = WrapBlocks()
    """Which modules."""
    preserve_rng_state: bool = True
    """Replay dropout exactly. False is faster and right only for blocks without randomness."""


ActivationCheckpointing = NoCheckpointing | CheckpointBlocks


# --- optimizer, clipping, data -------------------------------------------------------------------------------------


@frozen(kw_only=True)
class AdamW:
    """``torch.optim.AdamW``, created after the model is wrapped."""

    lr: float = 1e-3
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 1e-2
    """Decoupled weight decay; 0 for none."""


@frozen(kw_only=True)
class SGD:
    """``torch.optim.SGD``, created after the model is wrapped."""

    lr: float = 1e-3
    """Learning rate."""
    momentum: float = 0.0
    """0 for none; without momentum the optimizer has no state."""
    weight_decay: float = 0.0
    """L2 penalty; 0 for none."""
    nesterov: bool = False
    """Nesterov momentum."""


OptimizerSpec = AdamW | SGD


@frozen(kw_only=True)
class NoClip:
    """Gradients are not clipped."""


@frozen
class ClipNorm:
    """Scale all gradients so that their joint norm, over every rank's shards, is at most ``max_norm``."""

    max_norm: float
    """Above 0."""
    norm_type: float = 2.0
    """Which p-norm."""


@frozen
class ClipValue:
    """Clamp every gradient element to ``[-max_value, max_value]``."""

    max_value: float
    """Above 0."""


Clip = NoClip | ClipNorm | ClipValue


@frozen(kw_only=True)
class ShardLoaders:
    """Every data-parallel rank reads its own part of each loader (torch ``DistributedSampler``)."""

    seed: int = 0
    """Seed of the common shuffle; call ``ready.set_epoch(n)`` to shuffle anew."""
    drop_last: bool = False
    """Drop the tail that does not divide by the ranks. False repeats samples from the start instead."""


@frozen(kw_only=True)
class KeepLoaders:
    """Loaders are returned as they were given: the caller has split the data already."""


Loaders = ShardLoaders | KeepLoaders


# --- weights -------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class KeepWeights:
    """The values that the model has. A model on the meta device has none, and ``apply`` refuses it."""


@frozen
class InitWeights:
    """New values from the modules' own ``reset_parameters`` and ``_init_weights``, also for a model on meta.

    The values depend on the seed and on each module's path: they are equal on all ranks and for every world size.
    """

    seed: int = 0
    """Any whole number."""


@frozen
class LoadWeights:
    """Values from safetensors files, also for a model on meta: every rank reads the bytes of its own shards."""

    path: str
    """A ``.safetensors`` file, a ``.safetensors.index.json``, or the folder that holds either (``save_pretrained``)."""
    rename: tuple[tuple[str, str], ...] = ()
    """Regular expressions and what to put in their place, applied in turn to every key: ``(("^policy[.]", ""),)``."""


Weights = KeepWeights | InitWeights | LoadWeights


# --- the whole -----------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Config:
    """Everything that is asked of one model's preparation."""

    engine: Engine = Single()
    """Who holds what, and who talks to whom."""
    mesh: Mesh | None = None
    """Layout of the ranks. None: DDP replicates over all of them, FSDP2 and FSDP1 shard, TensorParallel cuts layers."""
    tensor: TensorPlan = TensorFromModel()
    """Which layers are cut, and how. Read only where the mesh has a tensor axis."""
    precision: Precision = AsStored()
    """Dtype of computation, reduction and outputs."""
    compile: Compile = NoCompile()
    """torch.compile: not, whole, or per block."""
    checkpointing: ActivationCheckpointing = NoCheckpointing()
    """Activation checkpointing: not, or per block."""
    weights: Weights = KeepWeights()
    """Where the parameters' values come from: the model itself, its initialisers, or a checkpoint."""
    intent: Intent = Intent.TRAINING
    """Training needs an optimizer and trainable parameters; inference needs neither."""
    device: str | None = None
    """Device type to compute on, such as ``cuda``. None: the one in the facts."""
    keep_device_map: bool = False
    """Leave a model that a device map has spread over devices as it is, in each of several processes (behaviour DM-2).
    It is not moved, and DDP gets no device ids. FSDP2 takes no such model."""
    backend: str | None = None
    """Process-group backend, such as ``cpu:gloo,cuda:nccl``. None: the planner's choice for device and offload."""
    timeout_s: float = 600.0
    """Time-out of every collective, in seconds."""
    optimizer: OptimizerSpec | None = None
    """An optimizer to create after wrapping. None: the one that is passed to ``build_plan``, if any."""
    accumulation: int = 1
    """Micro-batches per optimizer step."""
    clip: Clip = NoClip()
    """Gradient clipping, done by prepkit just before the optimizer steps."""
    scheduler_ticks: int = 1
    """Scheduler steps per optimizer step. accelerate ticks once per rank (behaviour W-16, pain 15)."""
    loaders: Loaders = ShardLoaders()
    """What happens to the data loaders."""
    overrides: tuple[str, ...] = ()
    """Ids of rules whose errors are accepted. Each use is recorded in the plan."""
