"""Values for a model that does not bring them along."""

from __future__ import annotations

from attrs import frozen

from prepkit.steps.common import Axis, File, LocalDevice


@frozen(kw_only=True)
class Chunk:
    """A part of a tensor: a range of every dim (as DCP's ``ChunkStorageMetadata``)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@frozen(kw_only=True)
class FlatPlace:
    """Where a tensor's elements lie, in a row, in a flat parameter that is cut evenly (FSDP1)."""

    start: int
    """Its first element in the flat parameter."""
    shard: int
    """Elements of the flat parameter on each rank."""
    axis: str
    """Mesh axis over which it is cut; empty: every rank holds the whole."""


@frozen(kw_only=True)
class FileSlice:
    """Where the values of one parameter or buffer, or of a block of it, lie, and how it is split.

    Which bytes a rank reads: ``plan.byte_ranges``.
    """

    name: str
    key: str
    """Name in the file."""
    file: int
    """Index into the step's files."""
    start: int
    """First byte in the file."""
    dtype: str
    """Dtype in the file."""
    shape: tuple[int, ...]
    """Of the whole parameter or buffer."""
    placements: tuple[str, ...] = ()
    """One per mesh axis, as in ``ParamLayout``; empty: every rank holds the whole."""
    chunk: Chunk | None = None
    """What of the whole lies here, in row-major order; None: all of it."""
    flat: FlatPlace | None = None
    """Its place in a flat parameter; None: it is in none."""


@frozen(kw_only=True)
class Transfer:
    """One parameter or buffer that travels from rank 0, and how it is split there. Which way: ``plan.broadcast``."""

    name: str
    dtype: str
    """Dtype that it travels in: the one that rank 0 has it in."""
    shape: tuple[int, ...]
    """Of what lies in a flat parameter all elements in a row."""
    placements: tuple[str, ...] = ()
    """One per mesh axis, as in ``ParamLayout``; empty: every rank holds the whole."""
    flat: FlatPlace | None = None
    """Its place in a flat parameter; None: it is in none."""


@frozen(kw_only=True)
class CheckFiles:
    """Compares size and header of every file with the plan's, and a sample of each tensor over the ranks.

    Changes nothing. Fails on every rank if a file is missing, unreadable, truncated or another one on any rank.
    """

    files: tuple[File, ...]


@frozen(kw_only=True)
class AllocateTensors:
    """Gives storage to all that is on meta, on the device, and moves the rest there; each object stays itself.

    What had no values has none yet: a later step fills it. Fails if the device is missing.
    """

    device: LocalDevice
    buffers: LocalDevice | None = None
    """Where buffers go; None: to ``device``. Offloading keeps parameters on the host, and buffers where it computes."""


@frozen(kw_only=True)
class InitializeTensors:
    """Runs the ``reset_parameters`` and ``_init_weights`` of the modules, unit by unit, on whole tensors.

    Each rank keeps its part. Takes parameters as they are named, buffers only where they were on meta.
    What they write over is lost. Fails if a module has neither method, or leaves one of the named tensors unwritten.
    """

    params: tuple[str, ...]
    buffers: tuple[str, ...]
    units: tuple[str, ...]
    """Paths of the modules whose parameters are whole at one time; ``""``, the last, is what no other holds."""
    seed: int


@frozen(kw_only=True)
class ReadTensors:
    """Every rank reads its own bytes into its own shards, without a copy of the whole, also where files hold parts.

    Casts where dtypes differ. What it writes over is lost. Fails on every rank if a file cannot be read on any.
    """

    files: tuple[File, ...]
    sources: tuple[FileSlice, ...]
    axes: tuple[Axis, ...]
    """Axes of the device mesh; empty without one."""


@frozen(kw_only=True)
class StashTensors:
    """Puts every parameter on meta, each object staying itself, and keeps what values it had on the host.

    So a model that has values on rank 0 alone is parallelized and sharded alike everywhere. Buffers stay as they are.
    Fails on every rank, before anything is changed, if rank 0 lacks the values of a parameter or buffer.
    """

    params: tuple[str, ...]
    buffers: tuple[str, ...]


@frozen(kw_only=True)
class SendTensors:
    """Rank 0 sends every rank its own shard, message by message, and frees what it had stashed.

    Rank 0's line is the narrow place: a shard leaves it once, for the first rank that keeps it; others that keep the
    same, such as HSDP's replicas, get it from there in a binomial tree (``plan.broadcast``). Of shards it sends about
    the model once, whatever the number of ranks or replicas. What all keep, or would keep in tiny shards, goes to all
    in such a tree, over NCCL in its broadcast. Casts where dtypes differ. What it writes over is lost. Fails on every
    rank if any fails.
    """

    tensors: tuple[Transfer, ...]
    axes: tuple[Axis, ...]
    """Axes of the device mesh; empty without one."""
