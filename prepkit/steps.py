"""The closed union of step kinds: one thing to do each, as plain data.

A step says everything that its handler needs. It never names a rank or a live object: what depends on the rank is
symbolic (``LocalDevice``) and bound in the handler; modules and parameters are named by canonical path.
"""

from __future__ import annotations

from typing import Literal

from attrs import frozen


@frozen(kw_only=True)
class LocalDevice:
    """The device of this rank: of this type, with the local rank as its index (no index on CPU)."""

    type: str


@frozen(kw_only=True)
class Axis:
    """One axis of the device mesh."""

    name: str
    size: int


@frozen(kw_only=True)
class Unit:
    """One ``fully_shard`` call: the module, what it shards, and whether it frees what it gathered."""

    path: str
    """Module path; ``""`` is the root."""
    reshard_after_forward: bool | int
    output_dtype: str | None = None
    """Dtype of the module's floating outputs; None leaves them."""


@frozen(kw_only=True)
class OptimizerOption:
    """One keyword argument of an optimizer."""

    name: str
    value: bool | float | tuple[float, ...]


@frozen(kw_only=True)
class StartProcessGroup:
    """Starts the default process group from the launcher's environment, or checks the one that runs.

    Fails if the launcher's variables are missing, or the world size or backend differ from the plan's.
    """

    backend: str
    world_size: int
    timeout_s: float


@frozen(kw_only=True)
class Agree:
    """Compares the plan's digest across ranks in one small collective; changes nothing.

    Fails on every rank, naming the odd ones, if any two ranks hold different plans or different models.
    """


@frozen(kw_only=True)
class BuildMesh:
    """Builds the device mesh over all ranks. Fails if the axes do not multiply to the world size."""

    device: str
    axes: tuple[Axis, ...]


@frozen(kw_only=True)
class ReleaseOptimizer:
    """Takes the model's parameters out of the optimizer, so that sharding can free them; keeps the state.

    Fails if a slot holds another parameter than ``slots`` says.
    """

    slots: tuple[tuple[str, ...], ...]
    """Per group, per slot, the parameter's canonical name; ``""``: a tensor that is not the model's, left alone."""


@frozen(kw_only=True)
class UpcastParameters:
    """Casts the named parameters in place, keeping each object, and the optimizer state that has their dtype.

    Fails if a name is not a parameter, or one holds a gradient.
    """

    names: tuple[str, ...]
    dtype: str


@frozen(kw_only=True)
class MoveModel:
    """Moves parameters and buffers to the device, in place. Fails if the device is missing or a tensor is on meta."""

    device: LocalDevice


@frozen(kw_only=True)
class AutocastForward:
    """Runs the root's forward under autocast, and casts its low-precision outputs. Fails if it already does."""

    device: str
    dtype: str
    output_dtype: str


@frozen(kw_only=True)
class CheckpointModules:
    """Puts a non-reentrant checkpoint wrapper in the place of each module. Fails if one is already checkpointed."""

    paths: tuple[str, ...]
    preserve_rng_state: bool


@frozen(kw_only=True)
class CompileModules:
    """Compiles each module in place, so that names and hooks stay. Fails if one is already compiled."""

    paths: tuple[str, ...]
    """``("",)`` is the whole model."""
    backend: str
    mode: str
    fullgraph: bool
    dynamic: bool | None


@frozen(kw_only=True)
class TensorCut:
    """Modules that are cut alike."""

    paths: tuple[str, ...]
    style: Literal["colwise", "rowwise", "sequence", "replicate"]
    takes: Literal["whole", "features", "heads", "sequence"]
    """How the input arrives on the ranks of the axis."""
    gives: Literal["whole", "features", "heads", "sequence"]
    """How the output leaves."""


@frozen(kw_only=True)
class ParallelizeModules:
    """Cuts modules over one axis of the mesh, with hooks that lay out their inputs and outputs; ties stay ties.

    Has no way back: the model has to be built again if a later step fails.
    Fails if a module is of another kind, cut already or holds a gradient, or if the ranks hold different weights.
    """

    cuts: tuple[TensorCut, ...]
    axis: str


@frozen(kw_only=True)
class ShardUnits:
    """Shards each unit over the mesh with ``fully_shard``, in this order; the root comes last.

    Has no way back: the model has to be built again if a later step fails.
    Fails if a unit is already sharded, a container without forward, or holds a scalar parameter.
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
class Communication:
    """A communication hook of torch by name; one with options gets a state made from them."""

    hook: Literal["fp16_compress_hook", "bf16_compress_hook", "powerSGD_hook"]
    wrapper: Literal["fp16_compress_wrapper", "bf16_compress_wrapper"] | None = None
    options: PowerSGDOptions | None = None


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


@frozen(kw_only=True)
class RegroupOptimizer:
    """Puts into every group the flat parameters that now hold its parameters, and joins their existing state.

    Fails if the parameters of one unit are not in one group, or their states cannot be joined.
    """

    slots: tuple[tuple[str, ...], ...]
    """As in ``ReleaseOptimizer``."""


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
    hook: Communication | None = None
    """Registered on the wrapper; None: gradients are reduced as they are."""


@frozen(kw_only=True)
class RebindOptimizer:
    """Puts into every slot the parameter that now has the slot's name, and moves existing state to its layout.

    Fails if a name is no longer a parameter, or state of the parameter's shape cannot take its layout.
    """

    slots: tuple[tuple[str, ...], ...]
    """As in ``ReleaseOptimizer``."""


@frozen(kw_only=True)
class CreateOptimizer:
    """Creates a torch optimizer over the named parameters of the model as it now stands.

    Where a flat parameter has taken the place of named ones, it stands for them, once.
    """

    algorithm: Literal["AdamW", "SGD"]
    names: tuple[str, ...]
    options: tuple[OptimizerOption, ...]


@frozen(kw_only=True)
class CreateGradScaler:
    """Creates the scaler that keeps small float16 gradients from vanishing. Fails if the device is not there."""

    device: str
    sharded: bool
    """FSDP1's, which asks all ranks whether one overflowed; torch's plain one does so for DTensors by itself."""
    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int


@frozen(kw_only=True)
class ShardLoader:
    """Rebuilds one loader so that each data-parallel rank reads its own part; the given loader is untouched."""

    index: int
    """Position among the loaders."""
    shuffle: bool
    seed: int
    drop_last: bool
    axes: tuple[str, ...] | None = None
    """Axes of the mesh over which the data is divided; on the others ranks read the same. None: over all ranks."""


@frozen(kw_only=True)
class ConvertFP8Linears:
    """Puts a torchao ``Float8Linear`` in the place of each Linear; without ``all_gather`` parameters stay the same.

    Fails if torchao cannot be imported, a module is no plain Linear any more, or one carries hooks that would be lost.
    """

    paths: tuple[str, ...]
    recipe: str
    """Name that torchao's ``Float8LinearConfig.from_recipe_name`` knows."""
    pad_inner_dim: bool
    all_gather: bool
    """Wrap the weights so that FSDP2 gathers them in float8: new parameters, of the same names."""
    emulate: bool


@frozen(kw_only=True)
class ConvertTransformerEngine:
    """Puts TransformerEngine's layers in the place of torch's and copies their values: new parameters, same names.

    Fails as ``ConvertFP8Linears`` does, and if a parameter is partitioned by ZeRO-3.
    """

    linears: tuple[str, ...]
    norms: tuple[str, ...]
    """Paths of LayerNorms with weight and bias."""


@frozen(kw_only=True)
class AutocastFP8Forward:
    """Runs the forward of whatever is outermost under TransformerEngine's autocast. Fails if it already does."""

    recipe: Literal["DelayedScaling", "MXFP8BlockScaling"]
    fp8_format: Literal["HYBRID", "E4M3"]
    margin: int
    during_eval: bool
    """Also while the model is in evaluation mode."""
    amax_history_len: int | None = None
    """None, here and below: not passed, because the recipe or newer libraries do not know it."""
    amax_compute_algo: str | None = None
    interval: int | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None


@frozen(kw_only=True)
class InitializeMSAMP:
    """MS-AMP replaces every Linear and the optimizer. Fails without Adam or AdamW, or if DDP would not reduce them."""

    opt_level: Literal["O1", "O2"]
    linears: tuple[str, ...]
    """Paths of the Linears that it will find."""
    kept: tuple[str, ...]
    """Paths of Linears that it is told to leave, because their weights are tied, or packed in fewer bits."""
    reduced: bool
    """DDP comes after it, which has to be MS-AMP's own to reduce float8 gradients."""


@frozen(kw_only=True)
class PrecomputeFloat8Scales:
    """After every optimizer step, one reduction gives the scales of all weights that FSDP2 gathers in float8.

    Fails without an optimizer, or if torchao cannot be imported.
    """


@frozen(kw_only=True)
class MoveToXLA:
    """Moves the model to the XLA device of this process. Fails if optimizer and model lie on different devices."""

    forked: bool
    """Through torch_xla's ``MpModelWrapper``."""


@frozen(kw_only=True)
class ReduceXLAGradients:
    """Before every optimizer step, averages the gradients over all processes. Fails without an optimizer."""


@frozen(kw_only=True)
class CastForward:
    """Casts the root's floating inputs to one dtype and its 16-bit floating outputs to another.

    Fails if the forward is cast already.
    """

    dtype: str
    output_dtype: str


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
class InitialiseDeepSpeed:
    """Hands model, optimizer and scheduler to ``deepspeed.initialize`` with this config, whole as it stands here.

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


@frozen(kw_only=True)
class File:
    """A safetensors file as it was when the plan was made."""

    path: str
    size: int
    header: str
    """Digest of the bytes before ``data``."""
    data: int
    """Where the header ends and the first tensor begins."""


@frozen(kw_only=True)
class Source:
    """Where the values of one parameter or buffer lie, and how it is split. Which bytes a rank reads: ``reads``."""

    name: str
    key: str
    """Name in the file."""
    file: int
    """Index into the step's files."""
    start: int
    """First byte in the file."""
    dtype: str
    """Dtype in the file."""
    shape: tuple[int, ...]
    placements: tuple[str, ...] = ()
    """One per mesh axis, as in ``ParamLayout``; empty: every rank holds the whole."""


@frozen(kw_only=True)
class CheckFiles:
    """Compares size and header of every file with the plan's, then waits for the other ranks; changes nothing.

    Fails on every rank if a file is missing, unreadable, truncated or another one on any rank.
    """

    files: tuple[File, ...]


@frozen(kw_only=True)
class AllocateTensors:
    """Gives storage to all that is on meta, on the device, and moves the rest there; each object stays itself.

    What had no values has none yet: a later step fills it. Fails if the device is missing.
    """

    device: LocalDevice


@frozen(kw_only=True)
class InitialiseTensors:
    """Runs the ``reset_parameters`` and ``_init_weights`` of the modules, unit by unit, on whole tensors.

    Each rank keeps its part. Takes parameters as they are named, buffers only where they were on meta.
    What they write over is lost. Fails if a module has neither method, or leaves one of the named tensors unwritten.
    """

    params: tuple[str, ...]
    buffers: tuple[str, ...]
    units: tuple[str, ...]
    """Paths of the modules whose parameters are whole at one time; ``""``, the last, is what no other holds."""
    seed: int


@frozen(kw_only=True)
class ReadTensors:
    """Every rank reads its own bytes into its own shards, without a copy of the whole.

    Casts where dtypes differ. What it writes over is lost. Fails on every rank if a file cannot be read on any.
    """

    files: tuple[File, ...]
    sources: tuple[Source, ...]
    axes: tuple[Axis, ...]
    """Axes of the device mesh; empty without one."""


Step = (
    StartProcessGroup
    | Agree
    | BuildMesh
    | ReleaseOptimizer
    | UpcastParameters
    | MoveModel
    | AutocastForward
    | ParallelizeModules
    | CheckpointModules
    | CompileModules
    | ShardUnits
    | ConvertSyncBatchNorm
    | WrapFSDP1
    | RegroupOptimizer
    | WrapDDP
    | RebindOptimizer
    | CreateOptimizer
    | CreateGradScaler
    | ShardLoader
    | ConvertFP8Linears
    | ConvertTransformerEngine
    | AutocastFP8Forward
    | InitializeMSAMP
    | PrecomputeFloat8Scales
    | MoveToXLA
    | ReduceXLAGradients
    | CastForward
    | MarkLeafModules
    | ConvertOptimizer
    | InitialiseDeepSpeed
    | CheckFiles
    | AllocateTensors
    | InitialiseTensors
    | ReadTensors
)
