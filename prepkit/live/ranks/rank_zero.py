"""Work that rank 0 does alone while the others wait to hear how it went."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist


class RankZeroFailed(RuntimeError):
    """Rank 0 failed at something that only it does; the same error on every other rank."""


def on_rank_zero(act: Callable[[], None], what: str) -> None:
    """Runs ``act`` on rank 0. Collective: returns on every rank once it is done.

    Raises on every rank where it fails: on rank 0 what it raised, on the others ``RankZeroFailed`` with the same text.
    ``what`` is the subject of that text, such as ``runs/7 could not be written``.
    """
    error: Exception | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            act()
        except Exception as raised:  # the others wait to hear how it went
            error = raised
    text = [None if error is None else f"{type(error).__name__}: {error}"]
    if dist.is_initialized():
        dist.broadcast_object_list(text, src=0)
    if error is not None:
        raise error
    if text[0] is not None:
        raise RankZeroFailed(f"{what}: rank 0 raised {text[0]}")
