"""Whether the ranks still train alike: the same learning rates, the same pass over the data, losses that are numbers.

Nothing else compares them. Replicas with rates of their own part step by step, and a rank that has left a pass early is
paired with batches of another.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor

from prepkit.live.model.local_part import local
from prepkit.live.ranks.agree import wire
from prepkit.live.training.looks import due
from prepkit.live.training.loop_order import LoopOutOfOrder

GROUPS = 8
"""Groups of an optimizer that are compared."""
_FIELDS = ("lr", "weight_decay")


@define(eq=False)
class RanksAlike:
    """One small all-reduce in the windows that are due (``training.looks``), where there are several ranks."""

    optimizers: tuple[Any, ...]
    _windows: int = field(default=0, init=False)
    _told: set[str] = field(factory=set, init=False)

    def before_step(self, loss: Tensor | None, epoch: int) -> None:
        """Raises ``LoopOutOfOrder`` on every rank where rates differ; warns, once, of passes and losses.

        ``loss`` is that of the last micro-batch. Collective in the windows that are due.
        """
        self._windows += 1
        if not due(self._windows):
            return
        fine = loss is None or bool(torch.isfinite(local(loss)).all())
        least, most = _over_ranks([float(epoch), float(fine), *_rates(self.optimizers)])
        self._refuse_rates(least[2:], most[2:])
        if least[0] != most[0]:
            self._tell(
                "pass",
                f"ranks are in different passes over their data, {least[0]:.0f} to {most[0]:.0f}: one has left a pass "
                "early, or loaders of the loop's own have different lengths. End passes on all ranks together, as by "
                "`if ready.reduce(float(done), 'max'):`",
            )
        if not least[1]:
            self._tell(
                "loss",
                f"the loss is not finite in window {self._windows}{'' if fine else ' on this rank'}, and no optimizer "
                "step can mend weights that are not: go back to a checkpoint, and lower the learning rate or write "
                "Config(clip=pk.ClipNorm(1.0))",
            )

    def _refuse_rates(self, least: Sequence[float], most: Sequence[float]) -> None:
        names = [f"{name} of group {group}" for group in range(GROUPS) for name in _FIELDS]
        apart = [(name, low, high) for name, low, high in zip(names, least, most, strict=True) if low != high]
        if apart:
            told = "; ".join(f"{name} from {low:g} to {high:g}" for name, low, high in apart[:3])
            raise LoopOutOfOrder(
                f"the optimizer has other settings on other ranks: {told}. Replicas would part. Set the same on every "
                "rank: where a metric decides, as for ReduceLROnPlateau, give it ready.reduce(metric)"
            )

    def _tell(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warnings.warn(message, stacklevel=7)


def _rates(optimizers: Sequence[Any]) -> list[float]:
    """Of the first groups of all optimizers, as many numbers on every rank; 0 where there is none."""
    groups = [group for one in optimizers for group in one.param_groups][:GROUPS]
    values = [float(group.get(name, 0.0)) for group in groups for name in _FIELDS]
    return values + [0.0] * (len(_FIELDS) * GROUPS - len(values))


def _over_ranks(values: list[float]) -> tuple[list[float], list[float]]:
    """The least and the most of each number over all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return values, values
    own = torch.tensor(values, dtype=torch.float32)
    sent = torch.stack((own, -own)).nan_to_num().to(wire())
    dist.all_reduce(sent, op=dist.ReduceOp.MAX)
    most, least = sent.cpu()
    return (-least).tolist(), most.tolist()
