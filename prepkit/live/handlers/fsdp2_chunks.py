"""``fully_shard`` without a cost that grows with the number of ranks.

To shard a parameter, torch divides it into one chunk per rank (``_chunk_with_empty``, a list of views), takes from that
list the chunk of this rank and, for its size, the first one, and drops all others. A view costs some microseconds: with
the 1,137 parameters of Llama 405B at 16,384 ranks that is two minutes on every rank.

``lean_chunks`` puts ``Chunks`` in the place of that function while units are sharded: an object that looks like the
list and makes a chunk only when it is asked for it. Both chunks that torch asks for are then made, and no others.
Nothing else of torch is touched, no memory is held, and on a torch whose code was not compared nothing is replaced.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen

from prepkit.plan.layout import chunk

KNOWN = ("2.6", "2.7", "2.11", "2.13", "2.15")
"""Releases of torch whose sharding was compared bit for bit with and without the replacement. On any other, torch's
own code runs: the same shards, later."""

_REPLACED = "_chunk_with_empty"
"""The function of torch's ``_fsdp_param`` that makes the list: tensor, number of chunks, dim."""
_ONE_AT_A_TIME = threading.Lock()
"""Two threads that replace the name would each put back what the other has put there."""


@frozen(eq=False)
class Chunks:
    """What ``_chunk_with_empty`` returns, each chunk made when asked for: a view, or an empty tensor past the end.

    Called as that function is, with its arguments in its order. Read by position only, as ``FSDPParam`` does (torch
    ``_fsdp_param.py``): ``chunks[0]`` and ``chunks[rank]``.
    """

    tensor: torch.Tensor
    """The whole parameter."""
    count: int
    """Number of ranks that it is sharded over."""
    dim: int
    """The dimension that is divided."""

    def __getitem__(self, index: int) -> torch.Tensor:
        """Chunk ``index`` of ``count``, as ``torch.chunk`` does: ``ceil(size / count)`` rows each, until none are left.

        Raises ``IndexError`` outside ``0 .. count - 1``.
        """
        if not 0 <= index < self.count:
            raise IndexError(f"chunk {index} of {self.count}")
        size = self.tensor.size(self.dim)
        start, rows = chunk(size, self.count, index)
        if size and not rows:  # of an empty tensor torch.chunk gives views, of any other nothing past its end
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, rows)


def known(version: str) -> bool:
    """Whether the replacement was verified on this torch: a release, not a nightly build.

    >>> known("2.13.0+cpu"), known("2.14.0"), known("2.13.0a0+git12")
    (True, False, False)
    """
    release = re.fullmatch(r"(\d+\.\d+)\.\d+(\+.*)?", version)
    return release is not None and release.group(1) in KNOWN


@contextmanager
def lean_chunks(version: str | None = None) -> Iterator[bool]:
    """While it is open, sharding costs no more than there are parameters; True where this torch is known.

    Changes one name in torch's ``_fsdp_param`` and puts it back at the end, whatever happens. Threads take turns.
    ``version`` None: the torch that runs.
    """
    module = _sharding_code() if known(str(torch.__version__) if version is None else version) else None
    if module is None:
        yield False
        return
    with _ONE_AT_A_TIME, _replaced(module):
        yield True


@contextmanager
def _replaced(module: Any) -> Iterator[None]:
    """Meanwhile the function of that module is ``Chunks``."""
    own = getattr(module, _REPLACED)
    try:
        setattr(module, _REPLACED, Chunks)
        yield
    finally:
        setattr(module, _REPLACED, own)


def _sharding_code() -> Any:
    """The module of torch that divides parameters; None where it no longer has the function."""
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_param
    except ImportError:
        return None
    return _fsdp_param if hasattr(_fsdp_param, _REPLACED) else None
