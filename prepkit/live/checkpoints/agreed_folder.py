"""The folder of a checkpoint, before anything is read or written there: a path, and the same one on every rank."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from prepkit.live.checkpoints.failures import CheckpointFailed

FIX = 'give every rank the same folder, such as "runs/7"'


def agreed_folder(folder: Any, done: str) -> str:
    """The folder as text. Collective. Raises ``CheckpointFailed`` on every rank where it is no path, or not the same.

    ``done`` is what was to be done with it: ``read`` or ``written``. Ranks of several nodes name a shared folder alike:
    rank 0 looks into it for all of them.
    """
    path, problem = _path(folder)
    told: list[tuple[str, str]] = [(path, problem)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (path, problem))
        told = everyone
    subject = f"no checkpoint could be {done}"
    if wrong := [f"{problem} (rank {rank})" for rank, (_, problem) in enumerate(told) if problem]:
        raise CheckpointFailed(f"{subject}: {'; '.join(wrong[:4])}; {FIX}")
    if len({path for path, _ in told}) > 1:
        first = next(rank for rank, (path, _) in enumerate(told) if path != told[0][0])
        what = f"rank 0 gives the folder {told[0][0]!r:.200}, and rank {first} {told[first][0]!r:.200}"
        raise CheckpointFailed(f"{subject}: {what}; {FIX}")
    return path


def _path(folder: Any) -> tuple[str, str]:
    """It as text, and what is wrong with it; empty for nothing."""
    path = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
    if not isinstance(path, str):
        return "", f"{folder!r:.60} is no path of a folder"
    if not path.strip():
        return "", f"{path!r} names no folder"  # pathlib would take the working directory
    if "\0" in path:
        return "", f"{path!r:.60} holds a null character, which no path does"
    return path, ""
