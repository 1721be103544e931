"""Where the accumulation windows of a loop end beside the passes over its data."""

from __future__ import annotations

import warnings

from attrs import define, field

from prepkit.findings.text import count
from prepkit.live.data.loader import Loader
from prepkit.live.data.micro_batches import MicroBatches

BY_HAND = (
    "Config(loaders=pk.ShardLoaders(ends_window=False)) and end the last window by `with ready.accumulate(last=True):`"
)


@define(eq=False)
class Windows:
    """Follows batches and micro-batches of a training loop, and warns, once each, where windows end elsewhere."""

    late: bool = field(default=False, init=False)
    """Whether the pass that ends windows is over, so that what is trained now was read ahead of its time."""
    _micro: MicroBatches = field(factory=MicroBatches, init=False)
    _over: int = field(default=0, init=False)
    """How many passes that end windows have gone to their end."""
    _began: int | None = field(default=None, init=False)
    """``_over`` when the window under way began; None: none is."""
    _told: set[str] = field(factory=set, init=False)

    def next_batch(self, loader: Loader) -> None:
        """A loader of training data gives another batch, or its pass is over."""
        self._micro.next_batch(loader)
        if loader.ends_window:
            self.late = loader.exhausted
            self._over += loader.exhausted

    def trained(self, *, ended: bool) -> None:
        """A micro-batch is over; ``ended``: and its window with it."""
        self._micro.count()
        if ended:
            self._began = None
        elif self._began is None:
            self._began = self._over

    @property
    def at_last(self) -> bool:
        """Whether the micro-batch in use is the last that is expected of its batch."""
        return self._micro.trained + 1 >= self._micro.expected

    def warn(self, accumulation: int, *, at_last_batch: bool) -> None:
        """Before a micro-batch ends; ``at_last_batch``: it is made of the last batch of a pass that ends windows."""
        if accumulation == 1:
            return
        if self.late:
            self._warn(
                f"a batch is trained after its loader has come to its end, as in `for batch in list(loader):` and with "
                f"a prefetcher that reads one batch ahead: the window of {accumulation} micro-batches ended with the "
                "batch that was read last, not with the one that is trained last. Write `for batch in "
                f"ready.loaders[0]:`, or {BY_HAND}. What was read ahead is not read again after a resume"
            )
        elif at_last_batch and self._micro.trained >= self._micro.expected:
            self._warn(
                f"the last batch of a pass makes more than {count(self._micro.expected, 'micro-batch')}, which is what "
                "most before it made, or one where none was read yet, and its window has ended. Let every batch make "
                f"as many, or write {BY_HAND}"
            )
        if self._began not in (None, self._over):
            self._warn(
                f"a window of {accumulation} micro-batches goes on over the end of a pass, whose last batch was left "
                "out, or made fewer micro-batches than those before it: the gradients are stepped with those of the "
                f"next pass. To step them with their own, write {BY_HAND}"
            )

    def _warn(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            warnings.warn(text, stacklevel=7)
