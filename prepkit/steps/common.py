"""What steps speak of (devices, mesh axes, files), and what comes before the model: processes, agreement, mesh."""

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


@frozen(kw_only=True)
class StartProcessGroup:
    """Starts the default process group from the launcher's environment, or checks the one that runs.

    Fails if the launcher's variables are missing, or the world size or backend differ from the plan's.
    """

    backend: str
    world_size: int
    timeout_s: float


@frozen(kw_only=True)
class Agree:
    """Compares the plan's digest across ranks in one small collective; changes nothing.

    Fails on every rank, naming the odd ones, if any two ranks hold different plans or different models.
    """


@frozen(kw_only=True)
class BuildMesh:
    """Builds the device mesh over all ranks. Fails if the axes do not multiply to the world size."""

    device: str
    axes: tuple[Axis, ...]
