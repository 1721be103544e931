"""How a model was prepared, as far as its wrappers, hooks and parameters still tell. Plain data."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from prepkit.facts.env import Env
from prepkit.facts.model import ModelFacts
from prepkit.facts.training import Scalar

NamedValues = tuple[tuple[str, Scalar], ...]


@frozen(kw_only=True)
class DDPOptions:
    """What one ``DistributedDataParallel`` was asked for."""

    ranks: int
    broadcast_buffers: bool
    bucket_cap_mb: float
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    hooks: tuple[tuple[str, NamedValues], ...] = ()
    """Name of each communication hook, its wrapper before it (``fp16_compress_wrapper powerSGD_hook``), and the options
    of its state."""
    mixed: bool = False
    """Whether it casts by itself (``mixed_precision=``)."""


@frozen(kw_only=True)
class FlatUnitOptions:
    """What one ``FullyShardedDataParallel`` was asked for."""

    path: str
    ranks: int
    copies: int
    sharding: str
    param_dtype: str | None
    reduce_dtype: str | None
    buffer_dtype: str | None
    offload: bool
    backward_prefetch: str | None
    forward_prefetch: bool
    limit_all_gathers: bool
    use_orig_params: bool
    cast_forward_inputs: bool
    cast_root_forward_inputs: bool


@frozen(kw_only=True)
class RecomputedModule:
    """A module whose activations are recomputed in backward."""

    path: str
    by: Literal["wrapper", "itself"] = "wrapper"
    """``itself``: a layer of transformers that calls ``checkpoint`` in its own call."""
    reentrant: bool = False
    preserve_rng_state: bool = True
    keep_ops: tuple[str, ...] = ()
    offload: bool = False
    unknown: str = ""
    """What of it has no name here; empty: nothing."""


@frozen(kw_only=True)
class CompiledModule:
    """A module with compiled code, and what ``torch.compile`` was asked for."""

    path: str
    backend: str
    mode: str = "default"
    fullgraph: bool = False
    dynamic: bool | None = None
    options: NamedValues = ()
    recompile_limit: int | None = None
    isolate_recompiles: bool = False
    inside: bool = False
    """Whether DDP or a unit of FSDP1 stands around it at the same place."""
    unknown: str = ""


@frozen(kw_only=True)
class AutocastOptions:
    """A forward that runs under autocast."""

    dtype: str
    output_dtype: str | None
    """To which 16-bit outputs are cast; None: they stay."""
    by: Literal["prepkit", "accelerate", "Fabric"]


@frozen(kw_only=True)
class TensorParallelModule:
    """A module that works on a part of its weights, or of the sequence."""

    path: str
    style: str
    """``colwise``, ``rowwise``, ``sequence``, ``replicate``; empty: its hooks are no known ones."""
    input_layout: str = ""
    output_layout: str = ""


@frozen(kw_only=True)
class SteppedGroup:
    """One group of an optimizer."""

    slots: tuple[str | None, ...]
    """Names of the model's own parameters, also where others have taken their places; None: none of the model's."""
    options: tuple[tuple[str, Scalar | tuple[float, ...]], ...]


@frozen(kw_only=True)
class OptimizerOptions:
    """One optimizer, out of all wrappers."""

    name: str
    module: str
    groups: tuple[SteppedGroup, ...]


@frozen(kw_only=True)
class HeldBytes:
    """What one rank holds of a kind of tensor on a kind of device, as it is now."""

    what: Literal["parameters", "gradients", "buffers", "optimizer state"]
    device: str
    bytes: int


@frozen(kw_only=True)
class HowPrepared:
    """How a model was prepared, and the model as it was before."""

    model: ModelFacts
    """Names, whole shapes, ties and classes, without what was done to them."""
    env: Env
    optimizers: tuple[OptimizerOptions, ...] = ()
    ddp: DDPOptions | None = None
    flat_units: tuple[FlatUnitOptions, ...] = ()
    pin_memory: bool = False
    """Whether offloaded shards of FSDP2 are page-locked."""
    recomputed: tuple[RecomputedModule, ...] = ()
    compiled: tuple[CompiledModule, ...] = ()
    autocast: AutocastOptions | None = None
    tensor_parallel: tuple[TensorParallelModule, ...] = ()
    tensor_ranks: int = 1
    unsharded: tuple[str, ...] = ()
    """Parameters that no unit of FSDP1 or FSDP2 has taken, where there are units."""
    deepspeed: str = ""
    """The engine's config as JSON text; empty: there is no engine."""
    leaf_modules: tuple[str, ...] = ()
    """Classes whose modules ZeRO-3 gathers whole."""
    unknown: tuple[str, ...] = ()
    """Whatever else was found, in words: float8 layers, wrappers of other libraries."""
    held: tuple[HeldBytes, ...] = ()
