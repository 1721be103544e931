"""A line that shows how far a long read is: on rank 0, where a person looks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

from prepkit.ranks.world import world


@contextmanager
def progress(what: str, total: int, console: Console | None = None) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with every number of bytes that is done, of ``total``.

    Shows a bar on rank 0 while it is open, if standard error is a terminal; does nothing anywhere else.
    """
    seen = sys.stderr.isatty() if console is None else console.is_terminal
    if not seen or not world().is_first:
        yield _nothing
        return
    from rich.console import Console  # a tenth of a second, and most runs show no bar
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console or Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


def _nothing(done: int) -> None:
    del done
