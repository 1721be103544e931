"""Runs that go on from a checkpoint within one program: what stood there is what is gone on with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from attrs import define, field
from torch import nn
from torch.nn import functional as fn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from prepkit.auditing.script import audit_run

WIDTH, SAMPLES, BATCH = 8, 48, 4


@define
class Job:
    """A job of a queue, which can be stopped inside a pass and gone on with."""

    workers: int = 0
    ahead: bool = False
    """Whether batches are read one ahead."""
    epoch: int = 0
    done: int = 0
    """Batches of this pass."""
    model: nn.Module = field(init=False)
    optimizer: Any = field(init=False)
    sampler: Any = field(init=False)
    loader: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 3))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-2)
        data = TensorDataset(torch.randn(SAMPLES, WIDTH), torch.randint(3, (SAMPLES,)))
        self.sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=3)
        self.loader = DataLoader(data, BATCH, sampler=self.sampler, num_workers=self.workers)

    def train(self, passed: int, steps: int) -> None:
        """So many steps, from inside a pass of which batches are passed over."""
        self.sampler.set_epoch(self.epoch)
        while True:
            for at, (x, y) in enumerate(self.reads()):
                if at < passed:
                    continue
                self.optimizer.zero_grad()
                fn.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()
                self.done, steps = at + 1, steps - 1
                if not steps:
                    return
            passed, self.done, self.epoch = 0, 0, self.epoch + 1
            self.sampler.set_epoch(self.epoch)

    def reads(self) -> Any:
        reading = iter(self.loader)
        waiting = [*islice(reading, 1 if self.ahead else 0)]
        for one in reading:
            waiting.append(one)
            yield waiting.pop(0)
        yield from waiting

    def state(self) -> dict[str, Any]:
        own = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy({**own, "epoch": self.epoch, "done": self.done})

    def goes_on(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch = state["epoch"]


def resumed(
    change: Callable[[dict[str, Any]], None] = lambda _: None, *, passed: int = 0, of: int | None = None, **kept: Any
) -> Callable[[], None]:
    """A run that is stopped inside its second pass, and goes on as another job.

    ``change``: what becomes of the checkpoint; ``passed``: batches that are passed over more than were done; ``of``:
    how many are, whatever was done.
    """

    def run() -> None:
        first = Job(**kept)
        first.train(0, SAMPLES // BATCH + 5)
        state = first.state()
        change(state)
        second = Job(**kept)
        second.goes_on(state)
        second.train(state["done"] + passed if of is None else of, 8)

    return run


def said(run: Callable[[], None]) -> list[str]:
    found = audit_run(run, steps=40)
    assert found is not None
    return [f"{one.rule} {one.what}" for one in found.findings if one.severity.name != "NOTE"]


def begins_anew(state: dict[str, Any]) -> None:
    state["epoch"] = 0


def loses_moments(state: dict[str, Any]) -> None:
    for one in state["optimizer"]["state"].values():
        one["exp_avg"].zero_()


def averages(state: dict[str, Any]) -> None:
    """Weights that are an average, which the optimizer has never stepped."""
    for one in state["model"].values():
        one.mul_(0.99)


def in_another_order(state: dict[str, Any]) -> None:
    """Each moment beside the next weight's place, which has another gradient."""
    held = state["optimizer"]["state"]
    held[1], held[3] = {**held[1], "exp_avg": held[1]["exp_avg"].flip(0)}, held[3]


def restarts(state: dict[str, Any]) -> None:
    """An optimizer that begins anew on purpose."""
    state["optimizer"]["state"].clear()


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (resumed(begins_anew), "passes over 5 with other samples: some come again"),
        (resumed(begins_anew, workers=1), "passes over 5 with other samples: some come again"),
        (resumed(passed=-1), "passes over 4: some come again."),
        (resumed(passed=1), "passes over 6: others never do."),
        (resumed(loses_moments), "the `exp_avg` of 4 weights is not what stood beside them"),
    ],
    ids=["another epoch", "of a worker", "too few", "too many", "moments"],
)
def test_what_is_gone_on_with_otherwise_is_told(run: Callable[[], None], told: str) -> None:
    (only,) = said(run)
    assert told in only, only


@pytest.mark.parametrize(
    "run",
    [resumed(), resumed(workers=1), resumed(ahead=True), resumed(of=0), resumed(averages), resumed(restarts)],
    ids=["rightly", "of a worker", "read ahead", "its pass from the beginning", "an average", "an optimizer anew"],
)
def test_what_is_gone_on_with_rightly_is_right(run: Callable[[], None]) -> None:
    assert said(run) == []
