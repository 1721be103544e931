"""How many micro-batches a loop makes of one batch of a loader: learned from the batches before."""

from __future__ import annotations

from collections import Counter

from attrs import define, field

from prepkit.live.data.loader import Loader


@define(eq=False)
class MicroBatches:
    """Counts the micro-batches of the batch that was read last, such as the chunks into which the loop cuts it."""

    trained: int = field(default=0, init=False)
    """Micro-batches that are over of the batch in use."""
    _of: Loader | None = field(default=None, init=False)
    """The loader that was read last, inside a pass."""
    _was_last: bool = field(default=False, init=False)
    """Whether the batch in use is the last of its pass: it may be smaller, and says nothing of others."""
    _seen: dict[Loader, Counter[int]] = field(factory=dict, init=False)
    """How many micro-batches the batches of a loader have made, and how many of them did."""

    def next_batch(self, loader: Loader) -> None:
        """The loader gives another batch, or its pass is over."""
        if self._of is not None and self.trained and not self._was_last:
            self._seen.setdefault(self._of, Counter())[self.trained] += 1
        self.trained = 0
        self._of = loader if loader.present is not None else None
        self._was_last = loader.present is not None and loader.present.last

    def count(self) -> None:
        """A micro-batch is over."""
        self.trained += 1

    @property
    def expected(self) -> int:
        """How many the batch in use will make: as most of those before it did; 1 where there was none."""
        seen = None if self._of is None else self._seen.get(self._of)
        return max(seen, key=lambda number: (seen[number], number)) if seen else 1
