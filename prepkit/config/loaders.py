"""What becomes of the data loaders."""

from __future__ import annotations

from attrs import frozen


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
