"""Before the model is touched: processes, agreement, mesh."""

from __future__ import annotations

from attrs import frozen

from prepkit.steps.common import Axis


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
