"""Programs of several phases: what one leaves to the next, and that right ones have nothing there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as fn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, SequentialLR

from prepkit.auditing.script import audit_run

Train = Callable[[], None]
WIDTH = 8


def said(train: Train, steps: int = 200) -> list[str]:
    """Rules of what is above a note."""
    found = audit_run(train, steps=steps)
    assert found is not None
    return [one.rule for one in found.findings if one.severity.name != "NOTE"]


def net(*, drops: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(drops), nn.Linear(16, 3))


def learn(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    fn.cross_entropy(model(torch.randn(6, WIDTH)), torch.randint(3, (6,))).backward()
    optimizer.step()


def schedule(optimizer: Any) -> Any:
    parts = [LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, 200)]
    return SequentialLR(optimizer, parts, milestones=[4])


def in_stages(*, then: str, length: int = 36, new: bool = True) -> Train:
    """A new optimizer for each stage; ``then``: what becomes of the rate."""

    def train() -> None:
        torch.manual_seed(0)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        ticked = schedule(optimizer)
        for stage in range(4):
            if stage and new:
                optimizer = torch.optim.AdamW(model.parameters(), ticked.get_last_lr()[0])
                ticked = schedule(optimizer) if then == "new" else ticked
            for _ in range(length):
                learn(model, optimizer)
                if then != "none":
                    ticked.step()
                if then == "by hand":
                    for group in optimizer.param_groups:
                        group["lr"] = ticked.get_last_lr()[0]

    return train


def finished() -> None:
    """Adam first, and an LBFGS behind it in the same loop, where the scheduler of Adam is ticked on."""
    torch.manual_seed(0)
    model, x = net(), torch.randn(6, WIDTH)
    adam, last = torch.optim.Adam(model.parameters(), 1e-3), torch.optim.LBFGS(model.parameters(), 0.1, max_iter=2)
    ticked = ExponentialLR(adam, 0.99)

    def closes() -> torch.Tensor:
        last.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss

    for at in range(20):
        if at < 10:
            learn(model, adam)
        else:
            last.step(closes)
        ticked.step()


def in_turns() -> None:
    """Two optimizers of one model in turn, with a scheduler each."""
    torch.manual_seed(0)
    model = net()
    both = [torch.optim.AdamW(model.parameters(), 1e-3) for _ in range(2)]
    ticked = [ExponentialLR(one, 0.99) for one in both]
    for at in range(24):
        learn(model, both[at // 6 % 2])
        for one in ticked:
            one.step()


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("then", ["new", "by hand", "none"])
def test_stages_with_optimizers_of_their_own_are_right(then: str, new: bool) -> None:
    assert said(in_stages(then=then, new=new)) == []


@pytest.mark.parametrize("train", [finished, in_turns])
def test_other_optimizers_behind_a_scheduler_are_right(train: Train) -> None:
    assert "run.scheduler-elsewhere" not in said(train)


def test_a_closure_that_is_called_several_times_wastes_nothing() -> None:
    assert said(finished) == []


def test_a_scheduler_whose_optimizer_was_replaced_is_told_with_its_line() -> None:
    assert said(in_stages(then="old")) == ["run.scheduler-elsewhere"]
    found = audit_run(in_stages(then="old"), steps=200)
    assert found is not None
    (told,) = found.findings
    assert "test_phases.py:" in told.what
    assert "ticks a `SequentialLR` of an optimizer that steps no more" in told.what


def test_an_optimizer_for_each_step_is_told_still() -> None:
    assert "run.optimizer-anew" in said(in_stages(then="none", length=1))


def two_trainings(*, second: str, steps: int = 5) -> Train:
    """A short training of one model, and then that of another, by one function."""

    def fits(model: nn.Module, optimizer: Any, steps: int, scheduler: Any = None) -> None:
        for _ in range(steps):
            learn(model, optimizer)
            for _ in range(0 if scheduler is None else 1 + (second == "ticks twice")):
                scheduler.step()

    def train() -> None:
        torch.manual_seed(0)
        first, then = net(), net()
        fits(first, torch.optim.Adam(first.parameters(), 1e-3), 5)
        if second == "holds another":
            other = torch.optim.Adam(net().parameters(), 1e-3)
            fits(then, other, 5)
        else:
            optimizer = torch.optim.AdamW(then.parameters(), 1e-3)
            fits(then, optimizer, 12, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200))

    return train


def test_a_second_training_is_looked_at_and_named() -> None:
    found = audit_run(two_trainings(second="right"), steps=50)
    assert found is not None
    assert found.fine
    assert "looked at too: Sequential, which AdamW trains behind it, up to its step 12" in str(found)
    assert said(two_trainings(second="holds another"), 50) != []


@pytest.mark.parametrize("steps", [50, 8])
def test_a_second_training_is_watched_as_the_first_one_is(steps: int) -> None:
    found = audit_run(two_trainings(second="ticks twice"), steps=steps)
    assert found is not None
    (told,) = found.findings
    assert (told.rule, told.where) == ("run.drift-ticks", "Sequential: scheduler")
    assert told.what == "In step 5 of AdamW: It was ticked 8 times in 4 steps."
    assert found.beside == (f"Sequential, which AdamW trains behind it, up to its step {min(steps, 12)}",)
