"""Units that are sharded."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Unit:
    """One ``fully_shard`` call: the module, what it shards, and whether it frees what it gathered."""

    path: str
    """Module path; ``""`` is the root."""
    reshard_after_forward: bool | int
    output_dtype: str | None = None
    """Dtype of the module's floating outputs; None leaves them."""


@frozen(kw_only=True)
class ShardUnits:
    """Shards each unit over the mesh with ``fully_shard``, in this order; the root comes last.

    Has no way back: the model has to be built again if a later step fails.
    Fails if a unit is already sharded, a container without forward, or holds a scalar parameter.
    Where the model is ``already_sharded`` nothing is changed: it fails if the model has others.
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
    ignored: tuple[str, ...] = ()
    """Frozen parameters that stay whole on every rank, on the mesh's device; neither cast nor gathered."""
    already_sharded: bool = False
    """Whether the model arrives with these units."""
