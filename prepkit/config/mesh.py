"""The mesh of ranks."""

from __future__ import annotations

from attrs import frozen


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
    """Number of ranks that each layer named in ``config.tp_plan`` is cut over."""
