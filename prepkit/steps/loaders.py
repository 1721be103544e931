"""Data loaders."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from prepkit.steps.common import LocalDevice

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
    seed: int
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
