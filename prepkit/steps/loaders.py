"""Data loaders."""

from __future__ import annotations

from attrs import frozen


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
