"""A line that shows how far a long read is: on rank 0, where a person looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from rich.console import Console


@contextmanager
def progress(what: str, total: int, console: Console | None = None) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with every number of bytes that is done, of ``total``.

    Shows a bar on rank 0 while it is open, if standard error is a terminal; does nothing anywhere else.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal or (dist.is_initialized() and dist.get_rank() != 0):
        yield _nothing
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


def _nothing(done: int) -> None:
    del done
