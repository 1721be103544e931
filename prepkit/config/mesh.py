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


@frozen(kw_only=True)
class AxisTraits:
    """What the rest of prepkit asks of an axis of the mesh."""

    name: str
    """A field of ``Mesh``, and the name of the axis in plans and in torch's ``DeviceMesh``."""
    same_data: bool = False
    """Ranks that differ on this axis only read the same samples."""


AXES: tuple[AxisTraits, ...] = (
    AxisTraits(name="replicate"),
    AxisTraits(name="shard"),
    AxisTraits(name="tensor", same_data=True),
)
"""One row for each field of ``Mesh``, the slowest axis first: ranks that are neighbours differ on the last."""

SAME_DATA = frozenset(axis.name for axis in AXES if axis.same_data)
"""Names of the axes whose ranks read the same samples."""
