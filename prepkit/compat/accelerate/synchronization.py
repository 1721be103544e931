"""Averaging over the ranks where a script says by itself which backward does it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.parallel import DistributedDataParallel

from prepkit.training.prepared import Prepared


@contextmanager
def not_averaged(ready: Prepared) -> Iterator[None]:
    """Forwards and backwards inside leave each rank its own gradients."""
    before = ready.loop.state.forced
    ready.loop.average(forced=False)
    try:
        yield
    finally:
        ready.loop.average(forced=before)


@contextmanager
def averaged_in_backward(ready: Prepared) -> Iterator[None]:
    """The backward inside averages all that has come together, though its forward ran in ``not_averaged``.

    Under DDP alone; elsewhere a backward asks what the engine was told last (torch ``Reducer``).
    """
    model = ready.model
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    before = ready.loop.state.forced
    ready.loop.average(forced=True)
    model.reducer.prepare_for_backward([])  # what the end of an averaging forward does
    ready.loop.forward_ran()
    try:
        yield
    finally:
        ready.loop.average(forced=before)
