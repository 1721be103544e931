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
    full_precision: bool = False
    """Gathers and reduces in float32, and takes inputs as they come: a batch norm."""


@frozen(kw_only=True)
class ShardUnits:
    """Shards each unit over the mesh with ``fully_shard``, in this order; the root comes last.

    Has no way back: the model has to be built again if a later step fails.
    Fails if a unit is already sharded, a container without forward, or holds a scalar parameter that is not ignored.
    Where the model is ``already_sharded`` nothing but ``reduce_unused`` is set: it fails if the model has other units.
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
    """Parameters that stay whole on every rank, on the mesh's device; neither cast nor gathered."""
    cast_forward_inputs: bool = True
    """Whether units cast their floating inputs to ``param_dtype``."""
    reduce_unused: bool = False
    """Whether zeros are reduced for a trained parameter without a gradient, so that every rank reduces alike."""
    already_sharded: bool = False
    """Whether the model arrives with these units."""


@frozen(kw_only=True)
class AverageGradients:
    """Averages the gradients of parameters that every rank holds whole, over the ranks that read different data.

    Once per window, before gradients are looked at and clipped; in a loop without ``Prepared`` before the step of any
    optimizer that holds them. One all-reduce of all of them per axis, in at least float32.
    Fails if the model has no parameter of one of the names, or the mesh no axis.
    """

    names: tuple[str, ...]
    axes: tuple[str, ...] = ()
    """Axes of the mesh to average over; empty: all of them."""
