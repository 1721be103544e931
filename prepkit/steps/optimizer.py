"""The optimizer, its grad scaler, and data loaders."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from prepkit.steps.common import LocalDevice


@frozen(kw_only=True)
class OptimizerOption:
    """One keyword argument of an optimizer."""

    name: str
    value: bool | int | float | str | tuple[float, ...]


@frozen(kw_only=True)
class OptimizerGroup:
    """Parameters that an optimizer steps with some options of their own."""

    names: tuple[str, ...]
    options: tuple[OptimizerOption, ...]


@frozen(kw_only=True)
class ReleaseOptimizer:
    """Takes the model's parameters out of the optimizer, so that sharding can free them; keeps the state.

    Fails if a slot holds another parameter than ``slots`` says.
    """

    slots: tuple[tuple[str, ...], ...]
    """Per group, per slot, the parameter's canonical name; ``""``: a tensor that is not the model's, left alone."""


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

    algorithm: str
    """Name of the class in ``torch.optim``."""
    names: tuple[str, ...]
    options: tuple[OptimizerOption, ...]
    groups: tuple[OptimizerGroup, ...] = ()
    """More of its groups, after that of ``names``, which is left out where there are no names."""
    index: int = 0
    """Which of several optimizers it is, in the order in which they are created."""


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


Split = Literal["samples", "sampler", "batches", "stream", "shards"]
"""How a loader is divided. ``samples``: the order is prepkit's, shuffled or not. ``sampler``: the indices are those of
the loader's own sampler. ``batches``: the batches are those of its own batch sampler, which stay whole. ``stream``:
each rank reads all of an ``IterableDataset``, and keeps its part. ``shards``: the data set gives each rank shards of
its own (``shard`` of ``datasets``)."""


@frozen(kw_only=True)
class ShardLoader:
    """Rebuilds one loader so that each data-parallel rank reads its own part; the given loader is untouched.

    Fails if the loader is no torch ``DataLoader``, is split already, or reads another kind of data set than planned.
    """

    index: int
    """Position among the loaders."""
    shuffle: bool
    seed: int | None
    """None: samplers draw as they do alone."""
    drop_last: bool
    axes: tuple[str, ...] | None = None
    """Axes of the mesh over which the data is divided; on the others ranks read the same. None: over all ranks."""
    same_data: int = 1
    """So many neighbouring ranks read the same, where there is no mesh: DeepSpeed's tensor-parallel ranks (DL-6)."""
    split: Split = "samples"
    batch_size: int | None = None
    """Samples in a batch of one rank; None: that of the loader."""
    dispatch: bool = False
    """Whether rank 0 reads for all ranks, and sends to each its batches."""
    spread: bool = False
    """A last incomplete round is spread over the ranks, so that every sample is read once; else it is filled up."""
    fill: bool = False
    """It is filled up to a whole batch on every rank, and not to equal parts."""


@frozen(kw_only=True)
class WrapLoader:
    """Wraps one loader: batches arrive on the device, epochs advance, the last batch may end the window.

    Fails if there is no such loader or device.
    """

    index: int
    """Position among the loaders."""
    device: LocalDevice | None
    """Where batches arrive; None: where the loader leaves them."""
    ends_window: bool
    """Whether the last batch of a pass ends the accumulation window."""
    evaluation: bool
    axes: tuple[str, ...] | None = None
    """As those of ``ShardLoader``: which ranks ``gather_for_metrics`` takes for readers of other data."""
    same_data: int = 1
    """Likewise."""
