"""The live objects that a plan is applied to, and what one step hands on to a later one.

Handlers read their step and this, and nothing else: not the plan, the config or the facts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not exported for checkers
from torch.distributed.device_mesh import DeviceMesh

from prepkit.findings import Finding

if TYPE_CHECKING:
    from prepkit.objects.whole_gradients import WholeGradients
    from prepkit.objects.xla_gradients import XLAGradients


def _alone() -> None:
    """There is nobody to wait for."""


@frozen(kw_only=True, eq=False)
class Stashed:
    """A parameter that ``StashTensors`` has put on meta, and its values, which wait to be sent to the ranks."""

    param: torch.nn.Parameter
    """On meta, the same object as before."""
    held: torch.nn.Parameter
    """What it was, on the host."""
    device: torch.device
    """Where it was."""


@define(kw_only=True)
class Target:
    """Mutable on purpose: handlers replace what they wrap. Everything else that a handler knows is in its step."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None
    loaders: list[Any] = field(factory=list)
    mesh: DeviceMesh | None = None
    """Set by ``BuildMesh``."""
    digests: tuple[tuple[str, str], ...] = ()
    """Names and digests that ``Agree`` compares across ranks."""
    unfilled: set[str] = field(factory=set)
    """Tensors that ``AllocateTensors`` gave storage and no later step has given values."""
    stashed: dict[str, Stashed] = field(factory=dict)
    """By name, what ``StashTensors`` has taken out of the model and ``SendTensors`` has yet to send."""
    scaler: torch.amp.GradScaler | None = None
    """Set by ``CreateGradScaler``."""
    whole_gradients: WholeGradients | XLAGradients | None = None
    """Set by ``AverageGradients``: what averages gradients that no unit reduces."""
    released: dict[str, Any] = field(factory=dict)
    """State taken out by ``ReleaseOptimizer`` for ``RebindOptimizer``: parameter name to state."""
    together: Callable[[], None] = _alone
    """A handler calls it between what it does by itself and what it does with all ranks: returns when all are there,
    and raises ``RankFailed`` on each when one of them has failed before."""
    watch: Callable[[], None] = _alone
    """Raises ``RankFailed`` where a rank has failed or ended; for waits that are no meeting and no collective."""
    store: Store | None = None
    """Where the ranks meet before there is a process group; ``StartProcessGroup`` starts the group over it."""
    ended: list[Any] = field(factory=list)
    """Process groups that were ended again (``groups.end``)."""
    explain: Callable[[], tuple[str, Callable[[str], tuple[str, ...]]]] | None = None
    """For ``Agree``, asked only when ranks differ: this rank's plan as text, and how it differs from another's."""
    judge: Callable[[tuple[Finding, ...]], tuple[Finding, ...]] = lambda findings: findings
    """Returns those of the findings that nobody has accepted (``court.judged``)."""
