"""What a person sees of a run: lines and bars of the main process, and of no other."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from prepkit.live.data.loader import Loader


def show(main: bool, values: tuple[Any, ...], sep: str, end: str, file: TextIO | None) -> None:
    """As ``Prepared.print``: above a bar that is open, not through it."""
    if not main:
        return
    text = sep.join(map(str, values))
    if "tqdm" in sys.modules:
        from tqdm import tqdm

        tqdm.write(text, file=file, end=end)
    else:
        (file or sys.stdout).write(f"{text}{end}")
    (file or sys.stdout).flush()


def bar(main: bool, iterable: Iterable[Any], options: dict[str, Any]) -> Any:
    """As ``Prepared.progress``."""
    from tqdm.auto import tqdm

    if not isinstance(iterable, Iterable):
        raise TypeError(
            f"ready.progress({iterable!r:.60}): give what is iterated, such as ready.loaders[0] or range(8)"
        )
    if isinstance(iterable, Loader):
        options = {"initial": iterable.batches_read, **options}
    hidden = options.pop("disable", None) if main else True
    options.pop("disable", None)
    return tqdm(iterable, disable=hidden, **options)
