"""Reading torch's distributed checkpoints without running anything that they contain.

torch unpickles ``.metadata``, and follows the file names in it. Here only its own classes are let through, and only
names of files that lie in the checkpoint's folder. Tensors are read with ``weights_only`` (torch ``filesystem.py``).
"""

from __future__ import annotations

import pathlib
import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from prepkit.live.checkpoints.failures import CheckpointFailed

FILE = ".metadata"
"""What torch writes last into a checkpoint, once every rank has written its part."""

LARGEST = 2**30
"""Bytes of the largest ``.metadata`` that is read."""

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


class _MetadataUnpickler(pickle.Unpickler):
    """``pickle`` looks classes up by a method, so this is one of the few places with a subclass."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in TORCH_CLASSES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.startswith("pathlib") and name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
            return pathlib.PurePath  # the folder it was written to, which may be of another system
        raise CheckpointFailed(
            f"{FILE} names {module}.{name}, which no checkpoint of torch is made of; nothing was run"
        )


def read_metadata(folder: Path) -> Metadata:
    """What the checkpoint in this folder says of its tensors. Raises ``CheckpointFailed`` for what is none."""
    path = folder / FILE
    if path.is_symlink() or not path.is_file() or path.stat().st_size > LARGEST:
        raise CheckpointFailed(f"{path} is no file of a checkpoint")
    try:
        metadata = _MetadataUnpickler(BytesIO(path.read_bytes())).load()
    except CheckpointFailed:
        raise
    except Exception as error:  # whatever pickle makes of damaged bytes
        raise CheckpointFailed(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointFailed(f"{path} is damaged: it holds a {type(metadata).__name__}")
    for name in {info.relative_path for info in metadata.storage_data.values()}:
        inside(folder, name)
    return metadata


def tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Name to shape and dtype of every tensor."""
    return {name: one for name, one in metadata.state_dict_metadata.items() if isinstance(one, TensorStorageMetadata)}


def inside(folder: Path, name: object) -> Path:
    """The file of this name. Raises ``CheckpointFailed`` for what leads out of the folder or is no plain file."""
    if not isinstance(name, str) or not name or Path(name).name != name:
        raise CheckpointFailed(f"{folder} names the file {name!r}, which would lie outside of it")
    path = folder / name
    if path.is_symlink() or not path.is_file():
        raise CheckpointFailed(f"{path} is not there, or no plain file")
    return path


def reader(folder: Path, metadata: Metadata) -> FileSystemReader:
    """Torch's reader of the tensors, which takes the metadata from here."""
    made = FileSystemReader(folder)
    metadata.storage_meta = None
    made.read_metadata = lambda *_args, **_options: metadata  # type: ignore[method-assign]
    return made


def read_plain(path: Path) -> Any:
    """What ``write_plain`` has written. Raises ``CheckpointFailed`` for what is no plain data."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointFailed(f"{path} holds more than plain data, and was not read: {error}") from error


def plain_bytes(value: Any, what: str) -> bytes:
    """The value as ``torch.save`` writes it, if ``read_plain`` would read it again. Raises ``CheckpointFailed``."""
    buffer = BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        line = str(error).splitlines()[0]
        raise CheckpointFailed(f"{what} is no plain data, which could not be read again safely: {line}") from error
    return buffer.getvalue()
