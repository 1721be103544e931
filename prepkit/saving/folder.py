"""A folder of checkpoints, of which one is the latest: the next is written beside it, and counts by one rename.

``folder/latest`` names the subfolder that is whole. A run that is killed while it saves leaves ``latest`` as it was;
what it had written of the new one is in a subfolder that ends in ``.partial``, which nothing reads. Two runs that save
into one folder write different subfolders, and the last to finish is the latest.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Any

from prepkit.facts.saved_run import GivenFolder
from prepkit.ranks.world import world
from prepkit.saving.failures import failed
from prepkit.saving.files import MANIFEST, METADATA

LATEST = "latest"
"""The file that names the subfolder of the latest whole checkpoint."""

PARTIAL = ".partial"
"""How the name of a subfolder ends that is being written."""

DIGITS = 6
"""Of the number that a subfolder's name begins with."""


def given(folder: Any) -> tuple[GivenFolder, ...]:
    """The folder as each rank has given it. Collective.

    Ranks of several nodes name a shared folder alike: rank 0 looks into it for all of them.
    """
    return tuple(world().gather(_given(folder)))


def _given(folder: Any) -> GivenFolder:
    path = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
    if not isinstance(path, str):
        return GivenFolder(path="", problem=f"{folder!r:.60} is no path of a folder")
    if not path.strip():
        return GivenFolder(path="", problem=f"{path!r} names no folder")  # pathlib takes the working directory
    if "\0" in path:
        return GivenFolder(path="", problem=f"{path!r:.60} holds a null character, which no path does")
    return GivenFolder(path=path)


def begin(folder: str, steps: int) -> Path:
    """Name a new subfolder to write into, the same on every rank. Collective; makes no folder yet."""
    ranks, name = world(), ""
    if ranks.is_first:
        number = max((_number(path) for path in checkpoints(folder)), default=0) + 1
        name = f"{number:0{DIGITS}d}-step-{steps}-{uuid.uuid4().hex[:6]}"
    return Path(folder, f"{ranks.from_first(name)}{PARTIAL}")


def publish(draft: Path, keep: int, spared: Collection[str] = ()) -> None:
    """Make what was written the latest checkpoint, and remove those before the last ``keep``. For rank 0.

    ``spared`` are names of another run's checkpoints, which are left alone. The one that ``latest`` named until now is
    removed last: at every moment the one that is named is whole.
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
    """Remove what was written of a checkpoint that failed. For rank 0."""
    shutil.rmtree(draft, ignore_errors=True)


def checkpoints(folder: str) -> list[Path]:
    """Every finished checkpoint of prepkit's in the folder, newest first."""
    here = Path(folder)
    found = [path for path in here.iterdir() if _number(path) and (path / MANIFEST).is_file()] if here.is_dir() else []
    return sorted(found, key=_number, reverse=True)


def find(folder: str) -> tuple[list[Path], str]:
    """Where checkpoints to go on from may be, the first choice first, and what is wrong with ``latest``. For one rank.

    The folder may itself be a checkpoint, prepkit's or one that torch has written. Raises ``CheckpointFailed`` where
    there is none, and says what is there instead.
    """
    here = Path(folder)
    if (here / MANIFEST).is_file() or (here / METADATA).is_file():
        return [here], ""
    name, problem = _named(here)
    named = here / name if name else None
    others = [path for path in checkpoints(folder) if path != named]
    found = others if named is None else [named, *others]
    if not found:
        what = f"{here / LATEST}: {problem}" if problem else _why_none(here)
        raise failed("checkpoint.not-there", here, what)
    return found, problem


def _why_none(here: Path) -> str:
    if not here.exists():
        return f"there is no such folder ({here.absolute()})"
    if partial := len(list(here.glob(f"*{PARTIAL}"))):
        return f"it holds no whole checkpoint, and {partial} that were never finished"
    if here.is_dir() and any(here.glob("random_states_*.pkl")):
        return (
            "it holds no checkpoint of prepkit's, but one of accelerate's save_state, whose optimizer state is not "
            "read: load its weights before build_plan, and begin the run anew"
        )
    return "it holds no whole checkpoint"


def nothing_finished(folder: str) -> bool:
    """True where there is no folder, or nothing in it that was ever a whole checkpoint."""
    here = Path(folder)
    if not here.exists():
        return True
    known = any((here / name).exists() for name in (LATEST, MANIFEST, METADATA))
    return not known and not any(_number(path) for path in here.iterdir())


def _number(path: Path) -> int:
    """The number of a finished checkpoint; 0 for anything else."""
    head = path.name.partition("-step-")[0]
    return int(head) if head.isdigit() and not path.name.endswith(PARTIAL) else 0


def _named(folder: Path) -> tuple[str, str]:
    """The subfolder that ``latest`` names, there or not, and what is wrong with the name; empty for none."""
    try:
        with (folder / LATEST).open(encoding="utf-8") as file:
            name = file.read(1024).strip()
    except (FileNotFoundError, NotADirectoryError):
        return "", ""
    except UnicodeDecodeError:
        return "", "it is no text"
    if not name or Path(name).name != name:
        return "", f"it names {name!r}, which is no subfolder"
    return name, ""


def _to_disk(folder: Path) -> None:
    """Make the names in a folder outlive a crash of the machine, where its file system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # not every system opens folders
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
