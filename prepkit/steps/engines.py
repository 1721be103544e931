"""What makes an engine of a model: shards, flat units, replicas, DeepSpeed, parts of layers, torch_xla."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from prepkit.steps.common import LocalDevice


@frozen(kw_only=True)
class Unit:
    """One ``fully_shard`` call: the module, what it shards, and whether it frees what it gathered."""

    path: str
    """Module path; ``""`` is the root."""
    reshard_after_forward: bool | int
    output_dtype: str | None = None
    """Dtype of the module's floating outputs; None leaves them."""
    full_precision: bool = False
    """Gathers and reduces in float32, and takes inputs as they come: a batch norm."""


@frozen(kw_only=True)
class ShardUnits:
    """Shards each unit over the mesh with ``fully_shard``, in this order; the root comes last.

    Has no way back: the model has to be built again if a later step fails.
    Fails if a unit is already sharded, a container without forward, or holds a scalar parameter that is not ignored.
    Where the model is ``already_sharded`` nothing but ``reduce_unused`` is set: it fails if the model has other units.
    """

    units: tuple[Unit, ...]
    param_dtype: str | None
    """Dtype of the gathered parameters; None: as stored."""
    reduce_dtype: str | None
    """Dtype of the gradient reduction; None: that of the gathered parameters."""
    offload: bool
    pin_memory: bool
    axes: tuple[str, ...] = ()
    """Axes of the mesh to shard over; empty: all of them."""
    ignored: tuple[str, ...] = ()
    """Parameters that stay whole on every rank, on the mesh's device; neither cast nor gathered."""
    cast_forward_inputs: bool = True
    """Whether units cast their floating inputs to ``param_dtype``."""
    reduce_unused: bool = False
    """Whether zeros are reduced for a trained parameter without a gradient, so that every rank reduces alike."""
    already_sharded: bool = False
    """Whether the model arrives with these units."""


@frozen(kw_only=True)
class AverageGradients:
    """Averages the gradients of parameters that every rank holds whole, over the ranks that read different data.

    Once per window, before gradients are looked at and clipped; in a loop without ``Prepared`` before the step of any
    optimizer that holds them. One all-reduce of all of them per axis, in at least float32.
    Fails if the model has no parameter of one of the names, or the mesh no axis.
    """

    names: tuple[str, ...]
    axes: tuple[str, ...] = ()
    """Axes of the mesh to average over; empty: all of them."""


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


@frozen(kw_only=True)
class MarkLeafModules:
    """Marks modules that ZeRO-3 is to gather whole, whatever they call inside. Fails if a path is no module."""

    paths: tuple[str, ...]


@frozen(kw_only=True)
class ConvertOptimizer:
    """Puts DeepSpeed's CPU form of the optimizer in its place, with the same groups.

    Fails if the optimizer has state, or DeepSpeed's kernel cannot be built.
    """

    algorithm: Literal["DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion"]
    decoupled: bool
    """Weight decay as in AdamW, not as in Adam; only DeepSpeedCPUAdam can do both."""


@frozen(kw_only=True)
class Setting:
    """One value of a DeepSpeed config."""

    path: tuple[str, ...]
    """Keys that lead to it, such as ``("zero_optimization", "stage")``."""
    value: str
    """The value as JSON text."""


@frozen(kw_only=True)
class PartitionParameters:
    """Divides each parameter over the ranks as ``deepspeed.zero.Init`` does, before DeepSpeed sees the model (ZeRO-3).

    One after the other: a rank holds its parts and one whole parameter. What is on meta has no values yet: a later step
    fills its part. Buffers are whole on the device; each parameter stays the object that it is. Nothing is sent.

    Has no way back: the model has to be built again if a later step fails.
    Fails if DeepSpeed is missing, works on another device, or has divided a parameter before.
    """

    device: LocalDevice
    settings: tuple[Setting, ...]
    """The complete config, as ``InitializeDeepSpeed`` has it: where parts lie, and how they are gathered."""


@frozen(kw_only=True)
class InitializeDeepSpeed:
    """Hands model, optimizer and scheduler to ``deepspeed.initialize`` with this config, whole as it stands here.

    MS-AMP's own ``initialize`` replaces the Linears and the optimizer as well, then does the same (behaviour DS-1).

    Has no way back: the model has to be built again if a later step fails.
    Fails if DeepSpeed is missing, works on another device, or refuses the config.
    """

    device: str
    """The device type that DeepSpeed must have found."""
    data_parallel: int
    """Ranks that see different data: fewer than all where DeepSpeed splits the model over some of them."""
    stage: int
    """ZeRO stage."""
    dtype: str | None
    """Dtype to which parameters and buffers are cast; None: they stay as they are."""
    optimizer: Literal["given", "section", "none"]
    """``given``: the optimizer that stands there; ``section``: DeepSpeed makes that of its config."""
    names: tuple[str, ...]
    """Parameters that DeepSpeed's own optimizer gets; empty unless it makes one."""
    scheduler: Literal["handed over", "section", "outside"]
    """``handed over``: DeepSpeed steps the one that is given; ``outside``: it knows of none."""
    settings: tuple[Setting, ...]
    """The complete config, sorted by path."""
    library: Literal["deepspeed", "msamp"] = "deepspeed"
    """Whose ``initialize`` is called: ``deepspeed``'s, or that of ``msamp.deepspeed``."""
    filled: bool = False
    """Earlier steps give the model its values, so that it may be on meta; parts of parameters are cast here."""
    kept: tuple[str, ...] = ()
    """Paths of Linears that MS-AMP is told to leave, as in ``InitializeMSAMP``."""


@frozen(kw_only=True)
class ParallelStyle:
    """Modules that are parallelized alike."""

    paths: tuple[str, ...]
    style: Literal["colwise", "rowwise", "sequence", "replicate"]
    input_layout: Literal["replicate", "features", "heads", "sequence"]
    """How the input arrives on the ranks of the axis."""
    output_layout: Literal["replicate", "features", "heads", "sequence"]
    """How the output leaves."""


@frozen(kw_only=True)
class ParallelizeModules:
    """Divides modules over one axis of the mesh, with hooks that lay out their inputs and outputs; ties stay ties.

    Has no way back: the model has to be built again if a later step fails.
    Fails if a module is of another kind, parallelized already or holds a gradient, or if the ranks hold different
    weights.
    """

    styles: tuple[ParallelStyle, ...]
    axis: str


@frozen(kw_only=True)
class MoveToXLA:
    """Moves the model to the XLA device of this process. Fails if optimizer and model lie on different devices."""

    forked: bool
    """Through torch_xla's ``MpModelWrapper``."""


@frozen(kw_only=True)
class ReduceXLAGradients:
    """Before every optimizer step, averages the gradients over all processes. Fails without an optimizer."""
