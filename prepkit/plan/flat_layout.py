"""Where a parameter lies in the flat parameter of its FSDP1 unit, and which part of it a rank holds.

Follows torch ``_flat_param.py``: the parameters of a unit lie end to end, with ``use_orig_params`` each at the next
multiple of 16 bytes in the dtype in which the unit computes; the whole is filled up to a multiple of the shards and cut
into equal parts (perf_anchors E; verified against torch under the fake process group).
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen


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
    """Whether a unit below the root is freed between its forward and its backward under an FSDP1 strategy.

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
