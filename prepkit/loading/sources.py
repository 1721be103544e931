"""Where a prepared loader gets its batches from. Each source wraps a torch ``DataLoader``, or any other iterable.

A source has ``loader``, what it reads; ``reads(epoch, consumed)``, one pass from where it stood; ``length()``;
``consumed(batches)``, where a pass stands after so many; and ``state()`` with ``restore(state)`` for what only the
loader itself can say of its position.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from attrs import define
from torch.utils.data import DataLoader

from prepkit.loading.batch_sampler import RankBatches
from prepkit.loading.draws import Drawing, RandomState, as_they_were, set_epoch
from prepkit.loading.rounds import Share, Tail
from prepkit.loading.streams import BatchRead, CollateShare, StreamPart


def rebuilt(loader: DataLoader[Any], **changes: Any) -> Any:
    """A copy of a loader, of whatever subclass, with other parts; the data set is shared, workers are not (DL-17)."""
    made = copy.copy(loader)
    made._iterator = None
    vars(made).update(changes)  # torch's ``__setattr__`` refuses these after construction
    return made


@define(eq=False, repr=False)
class IndexedSource:
    """A loader over a data set with indices. Which batch is the last is known from the indices, before it is read."""

    loader: Any
    batches: RankBatches
    ahead: bool = False
    """True if each batch is read before the one in use is given, as accelerate does it: what samples draw at random
    comes before what the step draws."""
    drew: RandomState | None = None
    """Where that is so: the generators as they were before the batch was read that is not given yet."""
    resumed: RandomState | None = None
    """Likewise, those from which the first batch of the next pass is read."""

    @classmethod
    def of(cls, loader: Any, batches: RankBatches) -> IndexedSource:
        """The loader with this batch sampler in the place of its own."""
        where = {"sampler": batches} if loader.batch_sampler is None else {"batch_sampler": batches}
        return cls(rebuilt(loader, in_order=True, **where), batches)

    def reads(self, epoch: int, consumed: int) -> Iterator[BatchRead]:
        """One pass. Indices that were read before are skipped; their data are not read."""
        self.batches.epoch, self.batches.start = epoch, consumed
        set_epoch(self.loader.dataset, epoch)
        with as_they_were(resumed=bool(consumed)):
            source = iter(self.loader)
        reads = map(_told, source, iter(self.batches.shares.popleft, None))
        yield from self._held(reads) if self.ahead else reads

    def _held(self, reads: Iterator[BatchRead]) -> Iterator[BatchRead]:
        """Each when the next has been read."""
        again, self.resumed = self.resumed, None
        with nullcontext() if again is None else again.inside():
            following = next(reads, None)
        while (read := following) is not None:
            self.drew = RandomState.now()
            following = next(reads, None)
            yield read
        self.drew = None

    def length(self) -> int:
        """Batches of a whole pass. Raises ``TypeError`` where nobody knows."""
        return len(self.batches)

    def consumed(self, batches: int) -> int:
        """Return what all ranks together have read when each has read so many whole batches."""
        self.batches.renew()
        return batches * self.batches.parts * (self.batches.size or 1)

    def state(self) -> Any:
        """Return what a batch was drawn from that was read ahead; seed, epoch and what was read say the rest."""
        return None if self.drew is None else self.drew.data()

    def restore(self, state: Any) -> None:
        """The batch is read again as it was."""
        self.resumed = None if state is None else RandomState.of_data(state)


def _told(batch: Any, share: Share) -> BatchRead:
    return BatchRead(batch, len(share.items), share.counted, share.consumed, share.last)


@define(eq=False, repr=False)
class StreamSource:
    """A stream, or any iterable of batches. It reads one batch ahead, to know which is the last."""

    loader: Any
    size: int = 1
    """Samples in a batch; 1 where that is not known, and batches are counted."""
    divided: StreamPart | None = None
    """The data set of the loader where every rank reads it whole and keeps its part."""
    restored: bool = False
    """True if the loader has been put to its position by itself, so that nothing is skipped."""
    now: Any = None
    """The loader's own state after the batch that is in use; None outside a pass, or where it has none."""
    drawing: Drawing | None = None
    """From what the newest pass was drawn. None: no pass was begun, or seed and epoch say it."""
    resumed: Drawing | None = None
    """Likewise, from what the next pass is drawn; None: as the generators are then."""
    began: int = 0
    """A digest of what the newest pass was divided from, as ``BatchRead.began`` has it."""
    repeats: bool = True
    """Whether the pass under way would give the same again, if it was begun again and what was read left out."""

    @classmethod
    def of(
        cls, loader: Any, *, parts: int, part: int, tail: Tail, seed: int, size: int | None, drop_last: bool
    ) -> StreamSource:
        """One rank's part of a loader's stream, in batches of ``size``; None: the stream yields whole batches."""
        stream = StreamPart(
            loader.dataset, size=size, drop_last=drop_last, parts=parts, part=part, tail=tail, seed=seed
        )
        collate = CollateShare(loader.collate_fn, single=size is None)
        changes = {"dataset": stream, "batch_size": None, "batch_sampler": None, "drop_last": False}
        return cls(rebuilt(loader, collate_fn=collate, **changes), size or 1, stream)

    def reads(self, epoch: int, consumed: int) -> Iterator[BatchRead]:
        """One pass. What was read before is read again and left out, unless the loader knows its own position."""
        if self.divided is not None:
            self.divided.epoch.fill_(epoch)
        else:
            set_epoch(getattr(self.loader, "dataset", None), epoch)
        each = self.consumed(1)
        count = consumed // each
        with self._as_it_drew(resumed=bool(count)):
            source = iter(self.loader)
            self.began = 0
            for _ in range(0 if self.restored else count):
                self._note(next(source, END))
            self.restored = False
            ahead = self._note(next(source, END))
        drawn, alone = RandomState.now(), True
        while ahead is not END:
            state = self._own_state()
            before = RandomState.now()
            alone = alone and before.same(drawn)
            read, ahead = ahead, next(source, END)
            drawn = RandomState.now()
            self.repeats = self.repeats and (alone or drawn.same(before))
            count, self.now = count + 1, state
            known = read if isinstance(read, BatchRead) else BatchRead(read)
            yield known._replace(consumed=count * each, last=ahead is END)
        self.now = None

    @contextmanager
    def _as_it_drew(self, *, resumed: bool) -> Iterator[None]:
        """Inside, a resumed pass draws as it did from its beginning up to the batch that is read ahead."""
        again, self.resumed = self.resumed, None
        restored, self.repeats = self.restored, True
        if self.divided is not None or restored or not resumed or again is None:
            self.drawing = None if self.divided is not None else Drawing.of(self.loader)
            with as_they_were(resumed=resumed):
                yield
            return
        self.drawing = again
        with again.again(self.loader):
            yield

    def length(self) -> int:
        """Batches of a whole pass. Raises ``TypeError`` where nobody knows: of workers each divides what it gives."""
        if self.divided is not None and self.loader.num_workers > 1:
            raise TypeError("a stream that is divided has no length of its own where several workers read it")
        return len(self.loader)

    def consumed(self, batches: int) -> int:
        """Return what all ranks together have read when each has read so many batches."""
        return batches * self.size * (1 if self.divided is None else self.divided.parts)

    def state(self) -> Any:
        """The loader's own state after the batch in use; None: it has none."""
        return self.now

    def restore(self, state: Any) -> None:
        """Puts the loader to its own position, for the next pass."""
        if state is not None:
            self.loader.load_state_dict(state)
            self.restored = True

    def _note(self, read: Any) -> Any:
        """The same; what the ranks began with comes with the first of a pass."""
        if isinstance(read, BatchRead):
            self.began = self.began or read.began
        return read

    def _own_state(self) -> Any:
        return self.loader.state_dict() if hasattr(self.loader, "state_dict") else None


END: Any = object()
"""What is read after the last batch."""
