"""A folder of checkpoints, of which one is the latest: the next is written beside it, and counts by one rename.

``folder/latest`` names the subfolder that is whole. A run that is killed while it saves leaves ``latest`` as it was;
what it had written of the new one lies in a subfolder of its own, ending in ``.partial``, that nothing reads. Two runs
that save into one folder write different subfolders, and the last to finish is the latest.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Collection
from pathlib import Path

import torch.distributed as dist

from prepkit.live.checkpoints import metadata
from prepkit.live.checkpoints.failures import CheckpointFailed

LATEST = "latest"
"""The file that names the subfolder of the latest whole checkpoint."""

MANIFEST = "prepkit.json"
"""What prepkit writes last into a checkpoint: what it is of, and the digests of its other files."""

PARTIAL = ".partial"
"""How the name of a subfolder ends that is being written."""

DIGITS = 6
"""Of the number that a subfolder's name begins with."""


def begin(folder: str, steps: int) -> Path:
    """A new subfolder to write into, the same on every rank. Collective; makes no folder yet."""
    name = [""]
    if not dist.is_initialized() or dist.get_rank() == 0:
        number = max((_number(path) for path in checkpoints(folder)), default=0) + 1
        name = [f"{number:0{DIGITS}d}-step-{steps}-{uuid.uuid4().hex[:6]}"]
    if dist.is_initialized():
        dist.broadcast_object_list(name, src=0)
    return Path(folder, f"{name[0]}{PARTIAL}")


def publish(draft: Path, keep: int, spared: Collection[str] = ()) -> None:
    """Makes what was written the latest checkpoint, and removes those before the last ``keep``. For rank 0.

    ``spared`` are names of checkpoints that are left alone, as they are another run's.

    The one that ``latest`` named until now goes last of all: at every moment one that is named is whole.
    """
    folder = draft.parent
    whole = draft.with_name(draft.name.removesuffix(PARTIAL))
    _to_disk(draft)
    draft.rename(whole)
    _to_disk(folder)
    pointer = folder / f".{LATEST}-{uuid.uuid4().hex}"
    with pointer.open("x", encoding="utf-8") as file:
        file.write(f"{whole.name}\n")
        file.flush()
        os.fsync(file.fileno())
    pointer.replace(folder / LATEST)  # from here on the new one counts
    _to_disk(folder)
    own = [path for path in checkpoints(str(folder)) if path != whole and path.name not in spared]
    for old in own[max(keep, 1) - 1 :]:
        shutil.rmtree(old, ignore_errors=True)


def discard(draft: Path) -> None:
    """Removes what was written of a checkpoint that failed. For rank 0."""
    shutil.rmtree(draft, ignore_errors=True)


def checkpoints(folder: str) -> list[Path]:
    """Every finished checkpoint of prepkit's in the folder, newest first."""
    here = Path(folder)
    found = [path for path in here.iterdir() if _number(path) and (path / MANIFEST).is_file()] if here.is_dir() else []
    return sorted(found, key=_number, reverse=True)


def find(folder: str) -> list[Path]:
    """Where checkpoints to go on from may lie, the first choice first. For one rank.

    The folder may itself be a checkpoint, prepkit's or one that torch has written. Raises ``CheckpointFailed`` where
    there is none, and says what lies there instead.
    """
    here = Path(folder)
    if (here / MANIFEST).is_file() or (here / metadata.FILE).is_file():
        return [here]
    named = _named(here)
    others = [path for path in checkpoints(folder) if path != named]
    if named is not None or others:
        return [*([named] if named is not None else []), *others]
    raise CheckpointFailed(_why_none(here))


def _why_none(here: Path) -> str:
    if not here.exists():
        return f"there is no such folder ({here.absolute()}); give the one that ready.save() wrote"
    if partial := len(list(here.glob(f"*{PARTIAL}"))):
        return f"it holds no whole checkpoint; {partial} that were never finished lie there"
    if here.is_dir() and any(here.glob("random_states_*.pkl")):
        return (
            "it holds no checkpoint of prepkit's, but one of accelerate's save_state, whose optimizer state is not "
            "read: load its weights before build_plan, and begin the run anew"
        )
    return "it holds no whole checkpoint; give the folder that ready.save() wrote"


def nothing_finished(folder: str) -> bool:
    """Whether there is no folder, or nothing in it that was ever a whole checkpoint."""
    here = Path(folder)
    if not here.exists():
        return True
    known = any((here / name).exists() for name in (LATEST, MANIFEST, metadata.FILE))
    return not known and not any(_number(path) for path in here.iterdir())


def _number(path: Path) -> int:
    """The number of a finished checkpoint; 0 for anything else."""
    head = path.name.partition("-step-")[0]
    return int(head) if head.isdigit() and not path.name.endswith(PARTIAL) else 0


def _named(folder: Path) -> Path | None:
    """The subfolder that ``latest`` names, there or not."""
    try:
        with (folder / LATEST).open(encoding="utf-8") as file:
            name = file.read(1024).strip()
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return None
    if not name or Path(name).name != name:
        raise CheckpointFailed(f"{folder / LATEST} names {name!r}, which is no subfolder")
    return folder / name


def _to_disk(folder: Path) -> None:
    """Makes the names in a folder outlive a crash of the machine, where its file system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # not every system opens folders
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
