"""The loaders of one prepared model, as a training loop goes through them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from attrs import define, field

from prepkit.court import refused
from prepkit.facts.loop import BatchRead, PassEnded
from prepkit.loading.arguments import check_count

if TYPE_CHECKING:
    from prepkit.loading.batch_sampler import RankBatches
    from prepkit.loading.loader import Loader


def prepared(loaders: tuple[Any, ...]) -> tuple[Loader, ...]:
    """Return those that apply has made; what reads them is imported once there are any."""
    if not loaders:
        return ()
    from prepkit.loading.loader import Loader

    return tuple(one for one in loaders if isinstance(one, Loader))


@define(eq=False, repr=False)
class Passes:
    """The loaders that are being read, and the batch in use."""

    loaders: tuple[Any, ...]
    _prepared: tuple[Loader, ...] = field(default=(), init=False)
    """Those of them that apply has made."""
    on_batch: Callable[[BatchRead | PassEnded], None] = lambda _: None
    """Called when a loader of training data gives another batch, or is outside its pass."""
    under_way: list[Loader] = field(factory=list, init=False)
    """Loaders with a pass under way, the innermost last."""
    read: bool = field(default=False, init=False)
    """True if any of those that are trained on was read in this process."""
    apart: int = field(default=0, init=False)
    """Steps since a batch of theirs was read or in use, in a loop that has taken some with one in use."""
    _used: bool = field(default=False, init=False)
    """True if a step was taken with a batch of theirs in use."""
    given_epoch: int = field(default=0, init=False)
    """The epoch that ``set_epoch`` was given last; a resume puts it back."""

    def __attrs_post_init__(self) -> None:
        self._watch(self.loaders)

    def add(self, loaders: tuple[Any, ...]) -> None:
        """Loaders that were prepared at another time count from here on as well."""
        self.loaders += loaders
        self._watch(loaders)

    def hear(self, loaders: Iterable[Loader], instead_of: Passes) -> None:
        """Batches of these are in use here too, and no longer there; nothing else of them counts."""
        for loader in loaders:
            loader.watchers[:] = [one for one in loader.watchers if one != instead_of._changed]
            loader.watchers.append(self._changed)

    def _watch(self, loaders: tuple[Any, ...]) -> None:
        made = prepared(loaders)
        self._prepared += made
        for loader in made:
            loader.watchers.append(self._changed)

    def stepping(self) -> None:
        """Takes note of a step that is about to be taken."""
        inside = False
        for one in self.under_way:  # a comprehension would be one call more in each window
            inside = inside or not one.evaluation
        self._used = self._used or inside
        self.apart = self.apart + 1 if self._used and not inside else 0

    @property
    def epoch(self) -> int | None:
        """Number of the first pass over the training data that has batches left; None: no loader here counts them."""
        return next((one.open_epoch for one in self._prepared if not one.evaluation), None)

    @property
    def began(self) -> int:
        """A digest of what the ranks together read first in the pass under way; 0: nobody can tell."""
        return next((batches.began for batches in self._divided() if batches.began), 0)

    @property
    def streams(self) -> tuple[int, ...]:
        """Likewise of what each loader's stream gave before it was divided, those of evaluation as well."""
        return (*map(_began, self.loaders[:STREAMS]), *(0,) * (STREAMS - len(self.loaders)))

    @property
    def divides_streams(self) -> bool:
        """Whether a loader here divides a stream over the ranks; the same on all of them."""
        return any(one.divides_stream for one in self._prepared)

    def unrepeatable(self) -> tuple[int, ...]:
        """Numbers of the loaders whose pass under way would begin in another order if it was begun again."""
        return tuple(self.loaders.index(one) for one in self._prepared if not one.repeats)

    def _divided(self) -> Iterator[RankBatches]:
        """Yield what divides the loaders of training data over the ranks by index."""
        for one in self._prepared:
            if not one.evaluation and one.rank_batches is not None:
                yield one.rank_batches

    def rest(self) -> None:
        """Let the workers of all loaders go."""
        for one in self._prepared:
            one.rest()

    def set_epoch(self, epoch: int) -> None:
        """The next pass over each loader has this number, which gives its order. They advance by themselves too."""
        from prepkit.loading import draws

        check_count("epoch", epoch, least=0)
        self.given_epoch = epoch
        for loader in self.loaders:
            draws.set_epoch(loader, epoch)

    def before_batch(self, act: Callable[[], None] | None) -> bool:
        """``act`` is called whenever a batch of training data is about to be read; False: no loader here will call."""
        training = [loader for loader in self._prepared if not loader.evaluation]
        for loader in training:
            loader.before_batch = act
        return bool(training)

    def gather(self, value: Any) -> Any:
        """Return what all ranks have made of the batches in use; see ``gather_for_metrics``."""
        if not self.under_way:
            raise refused("loop.gathered-outside-pass", "gather_for_metrics", "no batch of ready.loaders is in use")
        from prepkit.loading.reduce import gather_for_metrics

        loader = self.under_way[-1]
        assert loader.present is not None, "one that is outside a pass is not in the list"
        return gather_for_metrics(value, loader.present, loader.part, began=_began(loader))

    def _changed(self, loader: Loader) -> None:
        if sys.is_finalizing():
            return  # a pass that was left open goes with the interpreter, whose modules have gone before
        self.read = self.read or not loader.evaluation
        if loader.present is None:
            self.under_way = [other for other in self.under_way if other is not loader]
        elif loader not in self.under_way:
            self.under_way.append(loader)
        if not loader.evaluation and loader in self.loaders:
            at_end = False
            for one in self.under_way:
                at_end = at_end or one.at_window_end
            number = self.loaders.index(loader)
            if loader.present is None:
                self.on_batch(PassEnded(number, loader.exhausted, loader.ends_window, at_end))
            else:
                self.apart = 0
                self.on_batch(BatchRead(number, loader.present.last, loader.ends_window, at_end))


def _began(loader: Any) -> int:
    return next((one.stream_began for one in prepared((loader,))), 0)


STREAMS = 8
"""Loaders of which streams are compared: as many numbers in the exchange, on every rank."""
