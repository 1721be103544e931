"""Whether a backward averages the gradients over the ranks, where a script says so by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.parallel import DistributedDataParallel

from prepkit.live.training.prepared import Prepared


def average(ready: Prepared, *, on: bool) -> None:
    """Says whether the next forward and backward average."""
    ready._driver.sync(ready.model, on)


@contextmanager
def not_averaged(ready: Prepared) -> Iterator[None]:
    """Forwards and backwards inside leave each rank its own gradients."""
    average(ready, on=False)
    try:
        yield
    finally:
        ready._sync()


@contextmanager
def averaged_in_backward(ready: Prepared) -> Iterator[None]:
    """The backward inside averages all that has come together, though its forward ran in ``not_averaged``.

    Under DDP alone; elsewhere a backward asks what ``Driver.sync`` has said last (torch ``Reducer``).
    """
    model = ready.model
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    average(ready, on=True)
    model.reducer.prepare_for_backward([])  # what the end of an averaging forward does
    ready._order.forward_ran(model)
    try:
        yield
    finally:
        ready._sync()
