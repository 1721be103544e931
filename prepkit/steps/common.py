"""What steps speak of: devices, mesh axes, files."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class LocalDevice:
    """The device of this rank: of this type, with the local rank as its index (no index on CPU)."""

    type: str


@frozen(kw_only=True)
class Axis:
    """One axis of the device mesh."""

    name: str
    size: int


@frozen(kw_only=True)
class File:
    """A safetensors file as it was when the plan was made."""

    path: str
    size: int
    header: str
    """Digest of the bytes before ``data``."""
    data: int
    """Where the header ends and the first tensor begins."""
