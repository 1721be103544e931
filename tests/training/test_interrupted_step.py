"""What is true of a window whose end was interrupted: its gradients count once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import prepkit as pk
from prepkit.findings import RunRefused

RATE = 0.1


def prepared(schedule: Any = None, accumulation: int = 1) -> Any:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    scheduler = None if schedule is None else torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    cfg = pk.Config(accumulation=accumulation)
    return pk.apply(pk.build_plan(cfg, model, optimizer=optimizer, scheduler=scheduler))


def micro_batch(ready: Any) -> None:
    """One backward, whose gradients are 1."""
    ready.backward(ready.model(torch.ones(1, 2)).sum())


class RaisesOnce:
    """A step hook, or a function of a schedule, that raises in its call number ``at``."""

    def __init__(self, at: int) -> None:
        self.calls, self.at = 0, at

    def __call__(self, *_: object) -> float:
        self.calls += 1
        if self.calls == self.at:
            raise ValueError("once")
        return 1.0


def test_gradients_that_an_optimizer_has_had_are_not_stepped_again() -> None:
    ready = prepared()
    weight = ready.model.weight
    before = weight.detach().clone()
    ready.optimizer.register_step_post_hook(RaisesOnce(at=1))
    micro_batch(ready)
    with pytest.raises(ValueError, match="once"):
        ready.step()
    with pytest.raises(RunRefused, match=r"loop\.step-without-backward"):
        ready.step()
    micro_batch(ready)
    assert ready.step()
    assert torch.allclose(before - weight, torch.full_like(weight, 2 * RATE))


def test_a_window_is_over_where_its_scheduler_raises() -> None:
    ready = prepared(RaisesOnce(at=2))  # the first call is the scheduler's own, when it is made
    weight = ready.model.weight
    before = weight.detach().clone()
    micro_batch(ready)
    with pytest.raises(ValueError, match="once"):
        ready.step()
    micro_batch(ready)
    assert ready.step()
    assert ready.steps == 2
    assert torch.allclose(before - weight, torch.full_like(weight, 2 * RATE))


def one_cycle(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=RATE, total_steps=4)


def cycle_behind_a_warm_up(optimizer: Any) -> Any:
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, one_cycle(optimizer)], milestones=[2])


def chained(optimizer: Any) -> Any:
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer)
    return torch.optim.lr_scheduler.ChainedScheduler([constant, one_cycle(optimizer)], optimizer)


@pytest.mark.parametrize(
    ("made", "ticks", "steps"), [(one_cycle, 1, 4), (one_cycle, 3, 1), (cycle_behind_a_warm_up, 1, 6), (chained, 1, 4)]
)
def test_a_scheduler_is_not_stepped_past_its_end(made: Any, ticks: int, steps: int) -> None:
    """Torch raises, behind weights that have moved; a warning comes before the first step without a whole tick."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    cfg = pk.Config(scheduler_ticks=ticks)
    ready = pk.apply(pk.build_plan(cfg, model, optimizer=optimizer, scheduler=made(optimizer)))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=pk.errors.FindingWarning)
        for _ in range(steps):
            micro_batch(ready)
            assert ready.step()
    micro_batch(ready)
    with pytest.warns(pk.errors.FindingWarning, match="come to its total_steps: it ticks no more"):
        assert ready.step()
    rate = ready.optimizer.param_groups[0]["lr"]
    micro_batch(ready)
    assert ready.step()
    assert ready.optimizer.param_groups[0]["lr"] == rate


def test_a_block_inside_one_that_ends_its_window_lets_it_end() -> None:
    ready = prepared(accumulation=4)
    with ready.accumulate(last=True):
        with ready.accumulate():
            micro_batch(ready)
        assert ready.step()
    micro_batch(ready)
    assert not ready.step()


def test_a_closure_that_returns_no_loss_is_told_so() -> None:
    ready = prepared()
    with pytest.raises(TypeError, match=r"a closure of ready\.step\(\) returns it; this is NoneType"):
        ready.step(lambda: micro_batch(ready))
