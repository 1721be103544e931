"""Whether the ranks still train alike: the same learning rates, the same pass over the data, losses that are numbers.

Nothing else compares them. Replicas with rates of their own part step by step, and a rank that has left a pass early is
paired with batches of another. What they should not have alike is compared as well: random numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor
from torch.nn import Module

from prepkit.findings.text import count
from prepkit.live.model.local_part import local
from prepkit.live.ranks.agree import spans, wire
from prepkit.live.training import own_draws
from prepkit.live.training.looks import due
from prepkit.live.training.loop_order import LoopOutOfOrder
from prepkit.live.training.token_loss import Count
from prepkit.plan import Plan

GROUPS = 8
"""Groups of an optimizer that are compared."""
_FIELDS = ("lr", "weight_decay")

Loss = tuple[Tensor, Count | None]
"""A loss, and the number of tokens that it is a mean over; None: none was said."""


@define(eq=False)
class RanksAlike:
    """One small all-reduce in the windows that are due (``training.looks``), where there are several ranks."""

    plan: Plan
    optimizers: tuple[Any, ...]
    _windows: int = field(default=0, init=False)
    _told: set[str] = field(factory=set, init=False)

    def before_step(self, model: Module, loss: Loss | None, epoch: int) -> None:
        """Raises ``LoopOutOfOrder`` on every rank where rates differ; warns, once, of passes, losses and draws.

        ``loss`` is that of the last micro-batch. Collective in the windows that are due, which wait for the device.
        """
        self._windows += 1
        if not due(self._windows):
            return
        fine = _finite(loss)
        draws = own_draws.generator_number(self.plan)
        rates = _rates(self.optimizers)
        least, most = _over_ranks([float(epoch), float(fine), draws, *rates])
        if least[3:] != most[3:]:
            raise LoopOutOfOrder(_apart(rates, least[3:], most[3:]))
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
        alike = draws and least[2] == most[2] and own_draws.read_apart(self.plan)
        if alike and "draws" not in self._told and (dropping := own_draws.dropping(model)):
            self._tell("draws", _drawn_alike(self.plan, dropping))

    def _tell(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warnings.warn(message, stacklevel=7)


def _drawn_alike(plan: Plan, dropping: int) -> str:
    """What to say where ranks that read other samples have their generators in one state."""
    same = plan.world_size // plan.data_parallel_size  # neighbours that have to drop alike
    behind = f"torch.manual_seed(seed + dist.get_rank(){f' // {same}' if same > 1 else ''})"
    return (
        f"the random generators of all {plan.world_size} ranks are in one state: dropout in "
        f"{count(dropping, 'module')} takes the same elements on each, though ranks read other samples. "
        f"Write {behind} behind pk.apply (import torch.distributed as dist)"
    )


def _finite(loss: Loss | None) -> bool:
    """A mean over no tokens is no number, and counts nothing (``training.token_loss``)."""
    if loss is None or bool(torch.isfinite(local(loss[0])).all()):
        return True
    return loss[1] is not None and not bool(loss[1])


def _apart(own: Sequence[float], least: Sequence[float], most: Sequence[float]) -> str:
    """What to say of rates that differ, naming who has which. Collective: every rank has found the same."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(own))
    names = [f"{name} of group {group}" for group in range(GROUPS) for name in _FIELDS]
    differing = [place for place, (low, high) in enumerate(zip(least, most, strict=True)) if low != high]
    told = "; ".join(f"{names[place]} is {_holders([values[place] for values in everyone])}" for place in differing[:3])
    return (
        f"the optimizer has other settings on other ranks: {told}. Replicas would part. Set the same on every "
        "rank: where a metric decides, as for ReduceLROnPlateau, give it ready.reduce(metric)"
    )


def _holders(values: list[float]) -> str:
    """Values with the ranks that hold them, as ``0.1 on rank 0, 0.2 on ranks 1-3``; the first few."""
    holders: dict[float, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    shown = [f"{value:g} on rank{'s' * (len(at) > 1)} {spans(tuple(at))}" for value, at in list(holders.items())[:4]]
    return ", ".join(shown) + ", ..." * (len(holders) > 4)


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
