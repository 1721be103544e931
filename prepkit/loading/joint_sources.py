"""Sources whose ranks have to talk: streams that split themselves, and data that rank 0 reads for all.

Both talk in host memory, over a group that gloo serves, so that no accelerator waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attrs import define, frozen
from torch import Tensor
from torch.utils import _pytree as pytree

from prepkit.court import refused
from prepkit.loading.rounds import Tail, length, rounds
from prepkit.loading.sources import IndexedSource, StreamSource
from prepkit.loading.streams import BatchRead
from prepkit.ranks.world import ranks_of


@define(eq=False, repr=False)
class ShardsSource:
    """A stream that gives each rank shards of its own, so that nobody knows how many batches the others have.

    Before each batch the ranks agree on whether there is another, so that none goes on alone into a collective.
    """

    stream: StreamSource
    group: Any
    parts: int
    all_read: bool
    """True if ranks that are at their end read theirs again, without counting it, until all are. Else all stop with the
    first."""

    @property
    def loader(self) -> Any:
        """What is read."""
        return self.stream.loader

    def reads(self, epoch: int, consumed: int) -> Iterator[BatchRead]:
        """One pass. Raises ``RunRefused`` on every rank where one has no batch at all."""
        ranks = ranks_of(self.group)
        own = self.stream.reads(epoch, consumed // self.parts)
        ahead, counts = next(own, None), True
        if not bool(ranks.least(torch.tensor(ahead is not None, dtype=torch.int32))):
            if consumed:
                return
            raise refused("loaders.no-batch", "loader", "a rank has no batch of it")
        more = True
        goes_on = ranks.worst if self.all_read else ranks.least
        while more:
            assert ahead is not None, "the ranks have agreed that there is one"
            read, ahead = ahead, next(own, None)
            more = bool(goes_on(torch.tensor(ahead is not None, dtype=torch.int32)))
            yield read._replace(
                counted=read.counted if counts else 0, consumed=read.consumed * self.parts, last=not more
            )
            if more and ahead is None:
                own, counts = self.stream.reads(epoch, 0), False
                ahead = next(own, None)

    def length(self) -> int:
        """Raises ``TypeError``: the shards are known when they are read."""
        raise TypeError("a stream that splits itself has no length")

    def consumed(self, batches: int) -> int:
        """Return what all ranks together have read when each has read so many batches."""
        return self.stream.consumed(batches) * self.parts

    def state(self) -> Any:
        """The loader's own state on this rank."""
        return self.stream.state()

    def restore(self, state: Any) -> None:
        """Puts this rank's loader to its position."""
        self.stream.restore(state)


@frozen(eq=False, repr=False)
class Failed:
    """Rank 0 could not read; sent to the others in the place of a batch."""

    text: str


@define(eq=False, repr=False)
class DispatchedSource:
    """Rank 0 reads for all ranks, and sends to each its batch (behaviour DL-24)."""

    inner: IndexedSource | StreamSource
    group: Any
    parts: int
    part: int
    tail: Tail
    draws: bool = False
    """Whether the ranks that read nothing draw a number where a pass begins, as torch's loader does on rank 0."""

    @property
    def loader(self) -> Any:
        """What rank 0 reads."""
        return self.inner.loader

    def reads(self, epoch: int, consumed: int) -> Iterator[BatchRead]:
        """One pass. A failure to read is raised on rank 0, and as a ``RuntimeError`` on the others."""
        ranks = ranks_of(self.group)
        parts = ranks.gather(self.part)
        source = self._all_parts(epoch, consumed) if ranks.is_first else None
        if source is None and self.draws:
            torch.empty((), dtype=torch.int64).random_()
        while True:
            reads, error = None, None
            try:
                reads = None if source is None else next(source, None)
            except Exception as raised:
                error = raised
            sent = None if source is None else [Failed(repr(error)) if error else reads and reads[at] for at in parts]
            got = ranks.scatter(sent)
            if error is not None:
                raise error
            failed = got.text if isinstance(got, Failed) else None
            if failed is not None:
                raise RuntimeError(f"rank 0, which reads for all ranks, failed: {failed}")
            if got is None:
                return
            yield got

    def _all_parts(self, epoch: int, consumed: int) -> Iterator[tuple[BatchRead, ...]]:
        batches = ([read] for read in self.inner.reads(epoch, consumed))
        first: BatchRead | None = None
        for shares in rounds(batches, self.parts, self.tail, size=None):
            first = first or shares[0].items[0]
            at = max(share.items[0].consumed for share in shares)
            each = [share.items[0]._replace(counted=None if share.counted else 0) for share in shares]
            if shares[0].last and self.tail in ("repeat", "fill"):
                each = _cut_evenly([share.items[0] for share in shares if share.counted], first, self.parts) or each
            yield tuple(
                read._replace(
                    counted=of.items[0].counted if read.counted is None else read.counted, consumed=at, last=of.last
                )
                for read, of in zip(each, shares, strict=True)
            )

    def length(self) -> int:
        """Batches of this rank. Raises ``TypeError`` where nobody knows."""
        return length(self.inner.length(), 0, self.parts, self.tail, size=None)

    def consumed(self, batches: int) -> int:
        """Return what rank 0 has read when each rank has got so many batches."""
        return self.inner.consumed(batches * self.parts)

    def state(self) -> Any:
        """Of a loader that rank 0 alone reads nothing is kept but how far it is."""

    def restore(self, state: Any) -> None:
        """There is nothing to restore."""


def _cut_evenly(reads: list[BatchRead], first: BatchRead, parts: int) -> list[BatchRead]:
    """The samples of a last round in equal parts, filled up from the first ones, so that few are read again.

    Nothing where each part has a whole batch, or these are no tensors of so many samples, which nobody can cut.
    """
    sizes = [read.size or 0 for read in reads]
    if len(sizes) == parts and len(set(sizes)) == 1:
        return []
    leaves, specs = zip(*(pytree.tree_flatten(read.batch) for read in (*reads, first)), strict=True)
    rows = [{len(one) if isinstance(one, Tensor) and one.dim() else 0 for one in each} for each in leaves]
    if any(spec != specs[0] for spec in specs) or rows != [{size} for size in (*sizes, first.size or 0)]:
        return []
    each = -(-sum(sizes) // parts)
    again = -(-(each * parts - sum(sizes)) // max(1, first.size or 0))
    try:
        whole = [torch.cat([*of[:-1], *[of[-1]] * again]) for of in zip(*leaves, strict=True)]
    except RuntimeError:  # of other shapes, such as texts that are padded by the batch
        return []
    return [
        BatchRead(
            batch=pytree.tree_unflatten([one[at : at + each] for one in whole], specs[0]),
            size=each,
            counted=min(each, max(0, sum(sizes) - at)),
        )
        for at in range(0, each * parts, each)
    ]


BatchSource = IndexedSource | StreamSource | ShardsSource | DispatchedSource
