"""What was seen of a checkpoint: its files, and what their headers say of the tensors inside."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class StoredFile:
    """One safetensors file."""

    name: str
    """File name, in the folder of ``CheckpointFacts.folder``."""
    size: int
    """Bytes of the whole file."""
    header: str
    """Digest of its first bytes, up to the first tensor: names, dtypes, shapes and places of all tensors."""
    data: int
    """Where the header ends and the first tensor begins."""


@frozen(kw_only=True)
class StoredTensor:
    """One tensor in a file."""

    key: str
    dtype: str
    """Name in torch, such as ``bfloat16``; that of the format where torch has none."""
    shape: tuple[int, ...]
    file: int
    """Index into ``CheckpointFacts.files``."""
    start: int
    """First byte, counted from the beginning of the file. Elements lie in row-major order, little-endian."""
    length: int
    """Number of bytes."""


@frozen(kw_only=True)
class StoredProblem:
    """Why a checkpoint, or a file of it, cannot be read as it should be."""

    file: str
    what: str


@frozen(kw_only=True)
class CheckpointFacts:
    """What the headers of a checkpoint say. No tensor's data was read."""

    path: str
    """As it was asked for."""
    folder: str
    """Where the files are."""
    files: tuple[StoredFile, ...] = ()
    tensors: tuple[StoredTensor, ...] = ()
    """In the order of the files, and in each in the order of the bytes."""
    problems: tuple[StoredProblem, ...] = ()
