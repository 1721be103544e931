"""Layout of a parameter after apply, and the part of it that a rank holds: arithmetic on names, shapes and the mesh.

Chunks follow ``torch.chunk`` as ``fully_shard`` and ``distribute_tensor`` use it: a dimension is cut into
``ceil(size / ranks)`` rows per rank, so the last ranks may hold fewer rows or none (torch ``_fsdp_param.py``; verified
against it under the fake process group).

Flat parameters of FSDP1 follow torch ``_flat_param.py``: the parameters of a unit lie end to end, with
``use_orig_params`` each at the next multiple of 16 bytes in the dtype in which the unit computes; the whole is filled
up to a multiple of the shards and cut into equal parts (perf_anchors E; verified as above).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Literal

from attrs import frozen

from prepkit.steps import Axis

# --- flat parameters -------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class FlatPart:
    """Where one parameter lies in the flat parameter of its FSDP1 unit, and how that one is sharded."""

    start: int
    """Its first element in the flat parameter."""
    size: int
    """Elements of the whole flat parameter, padding included: a multiple of ``shards``."""
    shards: int
    """Equal parts that it is cut into; 1: every rank holds it whole."""
    original: bool
    """Whether the parameter is still there, as a view (``use_orig_params``), or only the flat one is."""

    @property
    def shard(self) -> int:
        """Elements of the flat parameter that each rank holds, padding included."""
        return self.size // self.shards


def frees_after_forward(sharding: str) -> bool:
    """Return whether a unit below the root is freed between its forward and its backward under an FSDP1 strategy.

    Under the others it stays gathered until its gradients are averaged, and the root does under every one (torch
    ``_post_forward_reshard``, ``_should_free_in_backward``).

    >>> frees_after_forward("HYBRID_SHARD"), frees_after_forward("SHARD_GRAD_OP")
    (True, False)
    """
    return sharding in ("FULL_SHARD", "HYBRID_SHARD")


def round_up(numel: int, multiple: int) -> int:
    """The smallest multiple that is not less than ``numel``.

    >>> round_up(5, 4), round_up(8, 4)
    (8, 8)
    """
    return -(-numel // multiple) * multiple


def flatten(sizes: Sequence[int], *, itemsize: int, ranks: int, cut: bool, original: bool) -> tuple[FlatPart, ...]:
    """The places of parameters of so many elements, in their order. ``itemsize`` in bytes, of the compute dtype.

    With ``use_orig_params`` the whole is filled up to a multiple of the ranks that share it even where it is not cut.

    >>> [part.start for part in flatten((3, 5, 2), itemsize=4, ranks=2, cut=True, original=True)]
    [0, 4, 12]
    >>> flatten((3, 5), itemsize=4, ranks=3, cut=True, original=False)[1].size
    9
    """
    step = 16 // itemsize if original else 1
    starts: list[int] = []
    end = 0
    for size in sizes:
        start = round_up(end, step)
        starts.append(start)
        end = start + size
    fill = ranks if cut or original else 1
    whole = round_up(end, fill)
    shards = ranks if cut else 1
    return tuple(FlatPart(start=start, size=whole, shards=shards, original=original) for start in starts)


def local_range(part: FlatPart, numel: int, shard: int) -> tuple[int, int]:
    """First and one past the last of the parameter's own elements that a shard holds; equal when it holds none.

    >>> part = FlatPart(start=4, size=16, shards=4, original=True)
    >>> [local_range(part, 6, shard) for shard in range(4)]
    [(0, 0), (0, 4), (4, 6), (6, 6)]
    """
    first = min(max(shard * part.shard - part.start, 0), numel)
    last = min(max((shard + 1) * part.shard - part.start, 0), numel)
    return first, last


Placement = Literal["replicate", "shard(0)", "shard(1)", "strided(0)", "off-mesh", "partition", "split"]
"""``strided(0)``: dim 0 is cut after a later axis has cut it (torch ``_StridedShard``: FSDP2 over a colwise layer), so
what a rank holds of the whole is no single range of rows. ``off-mesh``: the parameter's own mesh lacks this axis, along
which all ranks hold the same. ``partition``: an equal, padded part of all elements in a row (ZeRO-3). ``split``: by
DeepSpeed, as it sees fit."""


# --- any parameter ----------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class ParamLayout:
    """One parameter as it will be after apply: shape, dtype, class, and how it lies on the mesh."""

    name: str
    shape: tuple[int, ...]
    """Global shape."""
    dtype: str
    """Dtype in storage."""
    cls: str
    """``DTensor`` where it is sharded, else the class that it has: ``Parameter``, ``Params4bit`` …"""
    placements: tuple[Placement, ...]
    """One per mesh axis for what is sharded; empty for a plain parameter, which every rank holds whole."""
    unit: str
    """Path of the module that owns it as a unit; ``""`` is the root."""
    requires_grad: bool
    flat: FlatPart | None = None
    """Its place in the flat parameter of an FSDP1 unit; None: it is in none."""


UNCUT = frozenset({"replicate", "off-mesh", "partition", "split"})
"""Placements that cut no single dim."""


def sharded_dim(placement: str) -> int | None:
    """The dim that a placement cuts, ``n`` of ``shard(n)`` and ``strided(n)``; None: it cuts none.

    Raises ``ValueError`` for a word that is no placement.

    >>> [sharded_dim(word) for word in ("shard(0)", "strided(0)", "shard(1)", "replicate", "off-mesh")]
    [0, 0, 1, None, None]
    """
    return None if placement in UNCUT else int(placement.partition("(")[2].removesuffix(")"))


def chunk_rows(size: int, ranks: int) -> int:
    """Rows of the largest of ``ranks`` chunks of a dim: ``ceil(size / ranks)``, what rank 0 holds.

    ``fully_shard`` and ZeRO-3 allocate as many on every rank, also where a chunk has fewer or none.

    >>> chunk_rows(5, 4), chunk_rows(0, 4)
    (2, 0)
    """
    return -(-size // ranks)


def chunk(size: int, ranks: int, index: int) -> tuple[int, int]:
    """First row and number of rows of chunk ``index`` of a dim of ``size`` rows, as ``torch.chunk`` cuts it.

    Chunks have ``ceil(size / ranks)`` rows until none are left, so the last ones may have fewer or none; of those the
    first row is ``size``.

    >>> [chunk(5, 4, index) for index in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    rows = chunk_rows(size, ranks)
    offset = min(index * rows, size)
    return offset, min(rows, size - offset)


def coordinate(rank: int, axes: tuple[Axis, ...]) -> tuple[int, ...]:
    """Position of a rank on each axis; the last axis runs fastest.

    >>> coordinate(5, (Axis(name="replicate", size=2), Axis(name="shard", size=4)))
    (1, 1)
    """
    position: list[int] = []
    for axis in reversed(axes):
        rank, index = divmod(rank, axis.size)
        position.append(index)
    return tuple(reversed(position))


def local_shape(layout: ParamLayout, axes: tuple[Axis, ...], rank: int) -> tuple[int, ...]:
    """Shape of the part that ``rank`` holds; of a flattened parameter one dimension of that many elements.

    >>> p = ParamLayout(name="w", shape=(5, 3), dtype="float32", cls="DTensor",
    ...                 placements=("shard(0)",), unit="", requires_grad=True)
    >>> [local_shape(p, (Axis(name="shard", size=4),), rank) for rank in range(4)]
    [(2, 3), (2, 3), (1, 3), (0, 3)]
    """
    if layout.flat is not None and layout.flat.shards > 1:
        first, last = local_range(layout.flat, prod(layout.shape), coordinate(rank, axes)[-1])
        return (last - first,)
    if "partition" in layout.placements:  # deepspeed partition_parameters.py: rounded up, the same on every rank
        return (chunk_rows(prod(layout.shape), axes[layout.placements.index("partition")].size),)
    shape = list(layout.shape)
    # From the last axis to the first: what is strided is cut after the axes behind it, and others share no dimension.
    for placement, axis, index in reversed(tuple(zip(layout.placements, axes, coordinate(rank, axes), strict=False))):
        dim = sharded_dim(placement)
        if dim is not None:
            _, shape[dim] = chunk(shape[dim], axis.size, index)
    return tuple(shape)


@cache
def itemsize(dtype: str) -> int:
    """Bytes of one element of a torch dtype, by the bits in its name; packed 4-bit types fill a byte.

    >>> [itemsize(name) for name in ("float32", "bfloat16", "float8_e4m3fn", "complex64", "bool", "uint4")]
    [4, 2, 1, 8, 1, 1]
    """
    bits = re.search(r"[0-9]+", dtype)
    return max(1, int(bits.group()) // 8) if bits else 1
