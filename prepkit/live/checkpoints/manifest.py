"""The file that makes a checkpoint whole: what it is of, and the digests of all its other files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch.distributed as dist

from prepkit.codec import from_data, to_data
from prepkit.codec.text import canonical, digest_text, parse
from prepkit.facts.saved_run import SavedFile, SavedRun
from prepkit.findings import PlanRejected
from prepkit.live.checkpoints.failures import CheckpointFailed
from prepkit.live.checkpoints.folder import MANIFEST
from prepkit.live.checkpoints.metadata import inside

FORMAT = 1
"""Number of the format of a checkpoint; as ``codec.FORMAT``."""

KIND = "prepkit.checkpoint"
"""What the file says it is."""

LARGEST = 2**30
"""Bytes of the largest manifest that is read."""


def write(path: Path, saved: SavedRun) -> None:
    """Writes the manifest, and waits until it is on the disk."""
    data = to_data(saved)
    text = canonical({"kind": KIND, "format": FORMAT, "digest": digest_text(canonical(data)), "checkpoint": data})
    write_bytes(path / MANIFEST, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """A new file, on the disk before this returns."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> SavedRun:
    """The manifest of a checkpoint. Raises ``CheckpointFailed`` for one that is damaged or that is not all there."""
    path = inside(folder, MANIFEST)
    if path.stat().st_size > LARGEST:
        raise CheckpointFailed(f"{path} is larger than any manifest")
    try:
        data = parse(path.read_text(encoding="utf-8"), str(path))
        if not isinstance(data, dict) or data.get("kind") != KIND:
            raise CheckpointFailed(f"{path} is no manifest of a checkpoint")
        if data.get("format") != FORMAT:
            raise CheckpointFailed(f"{path} has format {data.get('format')!r:.20}, and this prepkit reads {FORMAT}")
        if data.get("digest") != digest_text(canonical(data.get("checkpoint"))):
            raise CheckpointFailed(f"{path} was changed after it was written: its digest is another")
        saved = from_data(data["checkpoint"], SavedRun, str(path))
    except (PlanRejected, UnicodeDecodeError) as error:
        raise CheckpointFailed(f"{path} is damaged: {error}") from error
    for file in saved.files:
        size = inside(folder, file.name).stat().st_size
        if size != file.size:
            raise CheckpointFailed(f"{folder / file.name} has {size} bytes, and had {file.size} when it was saved")
    return saved


def digests(folder: Path, names: list[str]) -> tuple[SavedFile, ...]:
    """Size and digest of these files."""
    return tuple(
        SavedFile(name=name, size=(folder / name).stat().st_size, sha256=_sha256(folder / name)) for name in names
    )


def damaged(folder: Path, saved: SavedRun) -> list[str]:
    """Names of files whose bytes are not those that were written; of every rank's share of the files."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    by_size = sorted(saved.files, key=lambda file: (-file.size, file.name))
    return [file.name for file in by_size[rank::world] if _sha256(inside(folder, file.name)) != file.sha256]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
