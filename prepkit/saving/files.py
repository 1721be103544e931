"""The files of a checkpoint: written to the disk, and read without running anything that they contain.

torch unpickles ``.metadata``, and follows the file names in it. Here only its own classes are let through, and only
names of files in the checkpoint's folder. Tensors are read with ``weights_only`` (torch ``filesystem.py``). The
manifest, ``prepkit.json``, is written last: it says what the checkpoint is of, and has the digests of all other files.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, TensorStorageMetadata

from prepkit.codec import from_data, to_data
from prepkit.codec.text import canonical, digest_text, parse
from prepkit.facts.saved_run import SavedFile, SavedRun
from prepkit.findings import PlanRejected
from prepkit.ranks.world import world
from prepkit.saving.failures import CheckpointFailed, failed

METADATA = ".metadata"
"""The file that torch writes last into a checkpoint, once every rank has written its part."""

MANIFEST = "prepkit.json"
"""The file that prepkit writes last into a checkpoint: its run, and the digests of its other files."""

SHARED = "shared.pt"
"""The file of all that is the same on every rank: scheduler, scaler, options of the optimizer's groups."""

PLAN = "plan.json"
"""The plan of the run that has saved."""

FORMAT = 1
"""Number of the format of a checkpoint; as ``codec.FORMAT``."""

KIND = "prepkit.checkpoint"
"""The manifest's own word for what it is."""

LARGEST = 2**30
"""Bytes of the largest manifest, or ``.metadata``, that is read."""

TORCH_CLASSES = frozenset(
    {
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("builtins", "set"),
        ("collections", "OrderedDict"),
    }
)
"""All that the metadata of a checkpoint is made of, besides dtypes and the path that it was written to."""


def _memory_format(kind: Any, name: str) -> Any:
    """Stands for ``getattr``, by which the first Pythons 3.11 name the member of an enum; it takes nothing else."""
    if kind is not _MEM_FORMAT_ENCODING:
        what = f"it names an attribute of {kind!r:.60}, which no checkpoint of torch is made of; nothing was run"
        raise failed("checkpoint.foreign", METADATA, what)
    return kind[name]


class _MetadataUnpickler(pickle.Unpickler):
    """``pickle`` looks classes up by a method, so this is one of the few places with a subclass."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if (module, name) in TORCH_CLASSES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.startswith("pathlib") and name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
            return pathlib.PurePath  # the folder it was written to, which may be of another system
        what = f"it names {module}.{name}, which no checkpoint of torch is made of; nothing was run"
        raise failed("checkpoint.foreign", METADATA, what)


def read_metadata(folder: Path) -> Metadata:
    """Read torch's description of the tensors in a checkpoint. Raises ``CheckpointFailed`` for what is none."""
    path = folder / METADATA
    if path.is_symlink() or not path.is_file() or path.stat().st_size > LARGEST:
        raise failed("checkpoint.damaged", path, "it is no file of a checkpoint")
    try:
        metadata = _MetadataUnpickler(BytesIO(path.read_bytes())).load()
    except CheckpointFailed:
        raise
    except Exception as error:  # whatever pickle makes of damaged bytes
        raise failed("checkpoint.damaged", path, f"{type(error).__name__}: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise failed("checkpoint.damaged", path, f"it holds a {type(metadata).__name__}")
    for name in {info.relative_path for info in metadata.storage_data.values()}:
        inside(folder, name)
    return metadata


def tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Name to shape and dtype of every tensor."""
    return {name: one for name, one in metadata.state_dict_metadata.items() if isinstance(one, TensorStorageMetadata)}


def inside(folder: Path, name: object) -> Path:
    """The file of this name. Raises ``CheckpointFailed`` for what leads out of the folder or is no plain file."""
    if not isinstance(name, str) or not name or Path(name).name != name:
        raise failed("checkpoint.foreign", folder, f"it names the file {name!r}, which would be outside of it")
    path = folder / name
    if path.is_symlink() or not path.is_file():
        raise failed("checkpoint.damaged", path, "it is not there, or no plain file")
    return path


def reader(folder: Path, metadata: Metadata) -> FileSystemReader:
    """Torch's reader of the tensors, which takes the metadata from here."""
    made = FileSystemReader(folder)
    metadata.storage_meta = None
    made.read_metadata = lambda *_args, **_options: metadata  # type: ignore[method-assign]
    return made


def read_plain(path: Path) -> Any:
    """The value in a file of ``plain_bytes``. Raises ``CheckpointFailed`` for what is no plain data."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise failed("checkpoint.foreign", path, f"it holds more than plain data, and was not read: {error}") from error


def plain_bytes(value: Any, what: str) -> bytes:
    """Write the value as ``torch.save`` does. Raises ``CheckpointFailed`` where ``read_plain`` would not read it."""
    buffer = BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        why = f"it is no plain data, which could not be read again safely: {str(error).splitlines()[0]}"
        raise failed("checkpoint.not-plain", what, why) from error
    return buffer.getvalue()


def own_file(rank: int) -> str:
    """The name of a rank's own file."""
    return f"rank-{rank:05d}.pt"


def write_manifest(path: Path, saved: SavedRun) -> None:
    """Write the manifest, and wait until it is on the disk."""
    data = to_data(saved)
    text = canonical({"kind": KIND, "format": FORMAT, "digest": digest_text(canonical(data)), "checkpoint": data})
    write_bytes(path / MANIFEST, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a new file, which is on the disk before this returns."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> SavedRun:
    """Read the manifest of a checkpoint, and look at the size of its files.

    Raises ``CheckpointFailed`` where it is damaged, or a file is missing or has another size.
    """
    path = inside(folder, MANIFEST)
    if path.stat().st_size > LARGEST:
        raise failed("checkpoint.foreign", path, f"it has more than {LARGEST} bytes, as no manifest has")
    try:
        data = parse(path.read_text(encoding="utf-8"), str(path))
        if not isinstance(data, dict) or data.get("kind") != KIND:
            raise failed("checkpoint.damaged", path, "it is no manifest of a checkpoint")
        if data.get("format") != FORMAT:
            what = f"it has format {data.get('format')!r:.20}, and this prepkit reads {FORMAT}"
            raise failed("checkpoint.other-format", path, what)
        if data.get("digest") != digest_text(canonical(data.get("checkpoint"))):
            raise failed("checkpoint.damaged", path, "it was changed after it was written: its digest is another")
        saved = from_data(data["checkpoint"], SavedRun, str(path))
    except (PlanRejected, UnicodeDecodeError) as error:
        raise failed("checkpoint.damaged", path, str(error)) from error
    for file in saved.files:
        size = inside(folder, file.name).stat().st_size
        if size != file.size:
            what = f"it has {size} bytes, and had {file.size} when it was saved"
            raise failed("checkpoint.damaged", folder / file.name, what)
    return saved


def digests(folder: Path, names: list[str]) -> tuple[SavedFile, ...]:
    """Size and digest of these files."""
    return tuple(
        SavedFile(name=name, size=(folder / name).stat().st_size, sha256=_sha256(folder / name)) for name in names
    )


def damaged(folder: Path, saved: SavedRun) -> list[str]:
    """Names of files whose bytes are not those that were written, of this rank's share of the files."""
    ranks = world()
    by_size = sorted(saved.files, key=lambda file: (-file.size, file.name))
    share = by_size[ranks.rank :: ranks.size]
    return [file.name for file in share if _sha256(inside(folder, file.name)) != file.sha256]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
