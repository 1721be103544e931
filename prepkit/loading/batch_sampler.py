"""The batch sampler of a prepared loader over a data set with indices: which samples this rank reads, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from hashlib import sha256
from itertools import chain, islice
from operator import itemgetter
from typing import Any

from attrs import define, field
from torch.utils.data import BatchSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from prepkit.court import refused
from prepkit.findings.text import count as count_of
from prepkit.loading.draws import Drawing, RandomState, drawn, set_epoch, with_own_generators
from prepkit.loading.rounds import Share, Tail, length, rounds


@define(eq=False, repr=False)
class SeededOrder:
    """The indices of a data set, as torch's ``DistributedSampler`` of one part draws them from seed and epoch.

    That one reads the length of its data when it is made, and a data set may have another in each pass.
    """

    data: Any
    shuffle: bool
    seed: int
    epoch: int = 0

    def __iter__(self) -> Iterator[int]:
        sampler: DistributedSampler[Any] = DistributedSampler(self.data, 1, 0, shuffle=self.shuffle, seed=self.seed)
        sampler.set_epoch(self.epoch)
        return iter(sampler)

    def __len__(self) -> int:
        return len(self.data)

    def set_epoch(self, epoch: int) -> None:
        """The next pass has this number."""
        self.epoch = epoch


@define(eq=False, repr=False)
class RankBatches:
    """Draws the batches of all ranks in one order, and yields this rank's.

    ``torch.utils.data.DataLoader`` takes it as a batch sampler, or as a sampler where it makes no batches itself. To
    start inside a pass the indices that were read are skipped, and no data are read for them.
    """

    order: Any
    """Sampler of the indices of all ranks; a batch sampler of the user's own where ``size`` is None."""
    size: int | None
    """Samples in a batch of one rank, in the newest pass. None: ``order`` yields whole batches."""
    drop_last: bool
    """True if a last batch with fewer samples is left out before anything is divided."""
    parts: int = 1
    part: int = 0
    tail: Tail = "repeat"
    seed: int | None = None
    """The draws follow from it and the epoch. None: they come from the order's own generators or else the process's."""
    single: bool = False
    """True if indices are yielded one by one, and not as batches."""
    given: Any = None
    """The batch sampler whose ``batch_size`` was ``size`` times ``split``: what it says when a pass begins holds."""
    split: int = 1
    epoch: int = 0
    start: int = 0
    """What all ranks together have read before in this pass: indices, or batches where these are whole."""
    shares: deque[Share] = field(factory=deque)
    """Of the newest pass: what was yielded and has not been taken out by the loader."""
    began: int = 0
    """A digest of what all ranks together read first in the newest pass, of 24 bits; 0: nothing was read yet."""
    drawing: Drawing | None = None
    """Where no seed says it: from what the newest pass was drawn."""
    drew: bool = False
    """True if the newest pass drew from the process's generators after its first batch, between draws of others."""
    resumed: Drawing | None = None
    """Likewise, from what the next pass is drawn; None: as the generators are then."""

    def __iter__(self) -> Iterator[Any]:
        self.shares, self.began = deque(), 0
        self.renew()
        return self._yield(self.shares, self._of_part(iter(self._drawn()), self.start), self.resumed)

    def renew(self) -> None:
        """Takes the batch size that ``given`` has now, as torch's loader does when a pass begins.

        Raises ``RunRefused`` for one that cannot be split as planned.
        """
        asked = getattr(self.given, "batch_size", None)
        if asked is not None and asked != (self.size or 0) * self.split:
            if asked < 1 or asked % self.split:
                what = f"its batch_size is {asked} now, which cannot be split over {count_of(self.split, 'rank')}"
                raise refused("loaders.split-batches", "loader", what)
            self.size = asked // self.split

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler that was given; None where samples are batched here."""
        return self.order if self.size is None else None

    def __len__(self) -> int:
        """Number of batches of a whole pass. Raises ``TypeError`` where the order has no length."""
        self.renew()
        count = len(self.order)
        if self.size is None:
            return length(count, 0, self.parts, self.tail, size=None)
        return length(0, count - count % self.size * self.drop_last, self.parts, self.tail, size=self.size)

    @property
    def repeats(self) -> bool:
        """Whether the pass under way would begin again as it began, so that a resume goes on in the same order."""
        if not self.began or self.drew:
            return not self.drew
        if self.seed is not None:
            return self._first(iter(self._drawn()))[1] == self.began
        if self.drawing is None or not isinstance(self.order, Sampler):
            return True
        with self.drawing.again(self.order, kept=True):
            return self._first(iter(self.order))[1] == self.began

    def _noted(self, order: Iterator[Any]) -> Iterator[Any]:
        """The order, drawn when it is asked for: torch's loader draws a seed in between."""

        def opened() -> Iterator[Iterable[Any]]:
            first, self.began = self._first(order)
            yield first
            yield order

        return chain.from_iterable(opened())

    def _first(self, order: Iterator[Any]) -> tuple[tuple[Any, ...], int]:
        """What the ranks together read first: a last round is filled up with it, and its digest tells orders apart."""
        first = tuple(islice(order, self.parts * (self.size or 1)))
        return first, int.from_bytes(sha256(repr(first).encode()).digest()[:3], "big") or 1

    def _drawn(self) -> Iterable[Any]:
        if self.seed is None:
            set_epoch(self.order, self.epoch)
            return chain.from_iterable(self._as_it_draws())  # an index costs nothing more
        order = with_own_generators(self.order, self.seed, self.epoch)
        set_epoch(order, self.epoch)
        return drawn(order, self.seed, self.epoch)

    def _as_it_draws(self) -> Iterator[Iterable[Any]]:
        """Yield the parts of the order, drawn when it is asked for, as torch's loader draws a seed in between.

        That of a resumed pass is drawn as it was then.
        """
        again = self.resumed
        self.drawing, self.drew = again or Drawing.of(self.order), False
        with nullcontext() if again is None else again.again(self.order):
            order = iter(self.order)
            first = list(islice(order, 1))
        yield first
        while self.size is None:  # batches of the user's own, few enough to look at each
            before = RandomState.now()
            batch = list(islice(order, 1))
            self.drew = self.drew or not RandomState.now().same(before)
            if not batch:
                return
            yield batch
        yield order

    def _of_part(self, order: Iterator[Any], start: int) -> Iterator[Share]:
        order = self._noted(order)
        first = tuple(islice(order, min(start, self.parts * (self.size or 1))))  # what a last round is filled up with
        for _ in islice(order, start - len(first)):
            pass
        batches = order if self.size is None else BatchSampler(order, self.size, self.drop_last)
        how: dict[str, Any] = {"size": self.size, "consumed": start, "first": first}
        return map(itemgetter(self.part), rounds(batches, self.parts, self.tail, **how))

    def _yield(self, shares: deque[Share], mine: Iterator[Share], again: Drawing | None) -> Iterator[Any]:
        """What is asked for of the pass; a loader with workers makes two of these, and asks the second one."""
        for share in chain(mine, (None,)):
            if self.resumed is again:
                self.resumed = None
            if share is not None:
                shares.append(share)
                yield share.items[0] if self.single else share.items
