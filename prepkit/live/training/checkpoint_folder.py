"""A folder in which one checkpoint is the latest: the next is written beside it, and takes its place by one rename.

``folder/latest`` names the subfolder that is whole. A run that is killed while it saves leaves ``latest`` as it was;
what it had written of the new one lies in a subfolder of its own, ending in ``.partial``, that nothing reads. Two runs
that save into one folder write different subfolders, and the last to finish is the latest.
"""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

import torch.distributed as dist

from prepkit.live.ranks.rank_zero import on_rank_zero

LATEST = "latest"
"""The file that names the subfolder of the latest whole checkpoint."""

METADATA = ".metadata"
"""What torch writes last into a checkpoint, once every rank has written its part."""

PARTIAL = ".partial"
"""How the name of a subfolder ends that is being written."""


def begin(folder: str) -> Path:
    """A new subfolder to write into, the same on every rank. Collective; makes no folder yet."""
    name = [f"checkpoint-{uuid.uuid4().hex[:12]}"]
    if dist.is_initialized():
        dist.broadcast_object_list(name, src=0)
    return Path(folder, f"{name[0]}{PARTIAL}")


def publish(draft: Path) -> None:
    """Makes what was written the latest checkpoint, and removes the one whose place it takes. Collective."""
    on_rank_zero(lambda: _publish(draft), f"{draft.parent} could not be written")


def discard(draft: Path) -> None:
    """Removes what was written of a checkpoint that failed. Collective."""
    on_rank_zero(lambda: shutil.rmtree(draft, ignore_errors=True), f"{draft} could not be removed")


def _publish(draft: Path) -> None:
    folder = draft.parent
    before = _named(folder)
    whole = draft.with_name(draft.name.removesuffix(PARTIAL))
    draft.rename(whole)
    pointer = folder / f".{LATEST}-{uuid.uuid4().hex}"
    with pointer.open("x", encoding="utf-8") as file:
        file.write(f"{whole.name}\n")
        file.flush()
        os.fsync(file.fileno())
    pointer.replace(folder / LATEST)  # from here on the new one counts
    if before is not None and before != whole:
        shutil.rmtree(before, ignore_errors=True)


def latest(folder: str) -> Path:
    """Where the latest whole checkpoint lies. A folder that torch itself has written a checkpoint into is one, too.

    Raises ``FileNotFoundError`` where there is none, and says what lies there instead.
    """
    here = Path(folder)
    named = _named(here)
    if named is not None:
        if (named / METADATA).is_file():
            return named
        raise FileNotFoundError(f"{here / LATEST} names {named.name}, which is not there or not whole")
    if (here / METADATA).is_file():
        return here
    partial = len(list(here.glob(f"*{PARTIAL}"))) if here.is_dir() else 0
    why = f"{partial} that were never finished lie there" if partial else "give the folder that ready.save() wrote"
    raise FileNotFoundError(f"{folder} holds no whole checkpoint; {why}")


def _named(folder: Path) -> Path | None:
    """The subfolder that ``latest`` names. Raises ``FileNotFoundError`` for a name that leads out of the folder."""
    try:
        name = (folder / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    if not name or Path(name).name != name:
        raise FileNotFoundError(f"{folder / LATEST} names {name!r}, which is no subfolder")
    return folder / name
