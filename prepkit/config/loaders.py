"""What becomes of the data loaders."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

Purpose = Literal["training", "evaluation"]


@frozen(kw_only=True)
class ShardLoaders:
    """Every data-parallel rank reads its own part of each loader, in an order that follows from seed and epoch.

    Each rank keeps the batch size that the loader has, and all ranks have the same number of batches.
    """

    seed: int = 0
    """Seed of what is drawn at random. The order is the same on any number of ranks, and another in every epoch."""
    draws: Literal["seed", "sampler"] = "seed"
    """What orders follow from. ``sampler``: samplers draw as they do alone, from their own generator or else from the
    process's, which have to be in one state on all ranks; streams follow from the seed all the same."""
    drop_last: bool = False
    """Drop the tail that does not divide by the ranks. False repeats samples from the start instead."""
    purpose: Purpose = "training"
    """For ``evaluation`` every sample is read once: the last batches are smaller instead of filled up. Where there are
    fewer samples than ranks, ``ready.ranks.gather_for_metrics`` leaves the repeats out."""
    split_batches: bool = False
    """The batch size that a loader has is that of all ranks together, and each rank gets its part of every batch."""
    dispatch: bool = False
    """Rank 0 reads for all ranks and sends each its batches: for data that only one process can read."""
    to_device: bool = True
    """Move each batch to the device that the model computes on."""
    ends_window: bool = True
    """The last batch of a pass ends the accumulation window, so that no gradient waits for the next epoch."""
    whole_batches: bool = False
    """The last batch of every rank is whole, filled up from the start as accelerate does it, so that nearly a batch per
    rank may be read twice. False cuts what is left into equal parts."""


@frozen(kw_only=True)
class KeepLoaders:
    """Loaders read what they read when they were given: the caller has split the data already."""

    purpose: Purpose = "training"
    """Evaluation never ends an accumulation window."""
    to_device: bool = True
    """Move each batch to the device that the model computes on."""
    ends_window: bool = True
    """The last batch of a pass ends the accumulation window, so that no gradient waits for the next epoch."""


@frozen
class EachLoader:
    """A choice for each loader, such as ``EachLoader((ShardLoaders(), ShardLoaders(purpose="evaluation")))``."""

    choices: tuple[ShardLoaders | KeepLoaders, ...]
    """In the order of the loaders."""


Loaders = ShardLoaders | KeepLoaders | EachLoader
