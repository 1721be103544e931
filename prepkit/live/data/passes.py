"""The loaders of one prepared model, as a training loop goes through them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from attrs import define, field

from prepkit.live.data import draws
from prepkit.live.data.gather import gather_for_metrics
from prepkit.live.data.loader import Loader
from prepkit.live.data.windows import Windows


@define(eq=False)
class Passes:
    """Which loaders are being read, and what that means for the batch in use."""

    loaders: tuple[Any, ...]
    on_batch: Callable[[], None]
    """Called when the batch in use may end a window, or no longer does."""
    under_way: list[Loader] = field(factory=list, init=False)
    """Loaders with a pass under way, the innermost last."""
    read: bool = field(default=False, init=False)
    """Whether any of those that are trained on was read in this process."""
    _windows: Windows = field(factory=Windows, init=False)

    def __attrs_post_init__(self) -> None:
        self._watch(self.loaders)

    def add(self, loaders: tuple[Any, ...]) -> None:
        """Loaders that were prepared at another time count from here on as well."""
        self.loaders += loaders
        self._watch(loaders)

    def _watch(self, loaders: tuple[Any, ...]) -> None:
        for loader in loaders:
            if isinstance(loader, Loader):
                loader.watchers.append(self._changed)

    @property
    def end_window(self) -> bool:
        """Whether the micro-batch in use is the last that is made of the last batch of a pass that ends windows."""
        return self._at_last_batch and self._windows.at_last

    @property
    def _at_last_batch(self) -> bool:
        return any(loader.at_window_end for loader in self.under_way)

    @property
    def epoch(self) -> int | None:
        """Number of the first pass over the training data that has batches left; None: no loader here counts them."""
        counted = (one.open_epoch for one in self.loaders if isinstance(one, Loader) and not one.evaluation)
        return next(counted, None)

    def set_epoch(self, epoch: int) -> None:
        """The next pass over each loader has this number."""
        for loader in self.loaders:
            draws.set_epoch(loader, epoch)

    def before_batch(self, act: Callable[[], None] | None) -> bool:
        """``act`` is called whenever a batch of training data is about to be read; False: no loader here will call."""
        training = [loader for loader in self.loaders if isinstance(loader, Loader) and not loader.evaluation]
        for loader in training:
            loader.before_batch = act
        return bool(training)

    def gather(self, value: Any) -> Any:
        """What all ranks have made of the batches in use; see ``gather_for_metrics``."""
        if not self.under_way:
            raise RuntimeError("gather_for_metrics belongs inside a loop over one of ready.loaders, batch by batch")
        loader = self.under_way[-1]
        assert loader.present is not None, "one that is outside a pass is not in the list"
        return gather_for_metrics(value, loader.present, loader.part)

    def warn_unread(self) -> None:
        """At the first optimizer step, of loaders that are split: who iterates those that were given reads all data."""
        if not self.read and dist.is_initialized() and dist.get_rank() == 0:
            warnings.warn(
                "no batch of ready.loaders was read before the first step: where the loop iterates the loaders that "
                "were given to build_plan, every rank trains on all samples. Write `for batch in ready.loaders[0]:`, "
                "or give build_plan no loaders",
                stacklevel=3,
            )

    def warn_none(self, readers: int) -> None:
        """The same where no loader was given: the loop has one that prepkit knows nothing of."""
        if not self.loaders and dist.is_initialized() and dist.get_rank() == 0:
            warnings.warn(
                f"build_plan was given no loader, and {readers} ranks train: unless the loop divides its data itself, "
                "as a DistributedSampler does, every rank trains on all samples. Write "
                "build_plan(..., loaders=[loader]) and `for batch in ready.loaders[0]:`, or "
                "Config(loaders=pk.KeepLoaders()) where data are divided",
                stacklevel=3,
            )

    def trained(self, *, ended: bool) -> None:
        """A micro-batch is over; ``ended``: and its window with it."""
        self._windows.trained(ended=ended)

    def warn_windows(self, accumulation: int) -> None:
        """Where a window of so many micro-batches does not end with its pass."""
        self._windows.warn(accumulation, at_last_batch=self._at_last_batch)

    def _changed(self, loader: Loader) -> None:
        self.read = self.read or not loader.evaluation
        if loader.present is None:
            self.under_way = [other for other in self.under_way if other is not loader]
        elif all(other is not loader for other in self.under_way):
            self.under_way.append(loader)
        if not loader.evaluation:
            self._windows.next_batch(loader)
        if loader.ends_window:
            self.on_batch()
