"""What the user asked for: a frozen ``Config`` and the unions of choices inside it.

Nothing here reads the environment or resolves a default from the machine: what is not said here is decided by
the planner, from facts, and the plan gives the reason.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

from prepkit.config.blocks import (
    ActivationCheckpointing,
    CheckpointBlocks,
    Compile,
    CompileBlocks,
    CompileModel,
    CompileOption,
    Wrap,
    WrapBlocks,
    WrapClasses,
    WrapPaths,
    WrapRoot,
    WrapSize,
)
from prepkit.config.engines import (
    DDP,
    FSDP1,
    FSDP2,
    ActivationLayout,
    CommHook,
    CompressHook,
    DeepSpeed,
    Mesh,
    Offload,
    OffloadToCPU,
    PowerSGDHook,
    Schedule,
    Sharding,
    TensorParallel,
    TensorParallelPlan,
    TPLayer,
    TPPlan,
    TPPlanFromModel,
)
from prepkit.config.field_docs import show_fields
from prepkit.config.loaders import EachLoader, KeepLoaders, Loaders, ShardLoaders
from prepkit.config.optimizer import *  # noqa: F403  # the file's table says what there is
from prepkit.config.optimizer import Clip, ClipNorm, ClipValue, OptimizerSpec
from prepkit.config.origin import Origin
from prepkit.config.precision import (
    BF16,
    FP8,
    FP16,
    MSAMP,
    DelayedScaling,
    DType,
    FP8Backend,
    Mixed,
    MXFP8BlockScaling,
    Precision,
    TorchAO,
    TransformerEngine,
)
from prepkit.config.weights import BroadcastWeights, InitWeights, LoadWeights, Weights
from prepkit.findings.keywords import explain_keywords


class Intent(StrEnum):
    """What the prepared model is for. Given, never guessed from the arguments (pain 19)."""

    TRAINING = "training"
    INFERENCE = "inference"


@frozen(kw_only=True)
class Single:
    """One process, one device, no wrapper."""


@frozen(kw_only=True)
class XLA:
    """Every process holds the whole model on its XLA device, such as a TPU core (behaviour XL-1, XL-2, PR-11)."""

    forked: bool = False
    """The processes were forked (``torch_xla.launch(start_method="fork")``); torch_xla has a wrapper for their move."""


Engine = Single | DDP | FSDP2 | FSDP1 | TensorParallel | XLA | DeepSpeed


@frozen(kw_only=True)
class Config:
    """Everything that is asked of one model's preparation."""

    engine: Engine = Single()
    """Who holds what, and who talks to whom."""
    mesh: Mesh | None = None
    """Layout of the ranks. None: DDP replicates over all of them, FSDP2 and FSDP1 shard, TensorParallel cuts layers."""
    tp_plan: TensorParallelPlan = TPPlanFromModel()
    """Which layers are cut, and how. Read only where the mesh has a tensor axis."""
    precision: Precision = None
    """Dtype of computation, reduction and outputs. None: as each parameter is stored; nothing is cast."""
    compile: Compile = None
    """torch.compile, of the whole model or per block. None: the model runs eagerly."""
    checkpointing: ActivationCheckpointing = None
    """Activation checkpointing per block. None: all activations are kept."""
    weights: Weights = None
    """Where the parameters' values come from: initialisers, a checkpoint, or rank 0. None: the model has them."""
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
    optimizer: OptimizerSpec | tuple[OptimizerSpec, ...] | None = None
    """An optimizer to create after wrapping, or several. None: what is passed to ``build_plan``, if anything."""
    accumulation: int | None = None
    """Micro-batches per optimizer step. None: 1, or what ``global_batch`` gives."""
    global_batch: int | None = None
    """Samples per optimizer step over all data ranks, from which ``accumulation`` follows: the loaders say how many a
    rank reads at once, the mesh how many ranks read (pain 4). None: whatever the three multiply to."""
    average_each: bool = False
    """Average gradients after every micro-batch of a window: traffic in the place of memory, where an engine would keep
    whole gradients until the last (behaviour W-31). ZeRO 2 and 3 always do."""
    clip: Clip = None
    """Gradient clipping, done by prepkit just before the optimizer steps. None: gradients are not clipped."""
    scheduler_ticks: int = 1
    """Scheduler steps per optimizer step. accelerate ticks once per rank (behaviour W-16, pain 15)."""
    total_steps: int | None = None
    """Optimizer steps that are planned in all, which the scheduler should last for. None: not known."""
    entry_points: tuple[str, ...] | None = None
    """Methods of the model, besides ``forward``, that run on the prepared model as its forward does: in its precision,
    on gathered parameters, with averaged gradients. None: the model's well-known ones, such as ``generate``."""
    loaders: Loaders = ShardLoaders()
    """What happens to the data loaders."""
    overrides: tuple[str, ...] = ()
    """Ids of rules whose errors are accepted. Each use is recorded in the plan."""
    origins: tuple[Origin, ...] = ()
    """Where the settings of an imported config were written; empty for one that was written for prepkit."""


show_fields(globals())
explain_keywords(globals())
