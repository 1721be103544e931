"""Averages that follow what they average at once, weights that lie over each other, and their neighbours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as fn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from prepkit.auditing import looks
from tests.audit.test_steps import STEPS, Train, batches, found, layers

Keep = Callable[[int], float]
"""The part of an average that is kept in a step, by the number of the step."""


def averaged(keep: Keep, every: int = 1) -> Train:
    """A loop with a copy of the model that is averaged behind each of so many steps."""

    def train() -> None:
        torch.manual_seed(0)
        model = layers()
        average = copy.deepcopy(model).requires_grad_(requires_grad=False)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for at, (x, y) in enumerate(batches()):
            optimizer.zero_grad()
            fn.cross_entropy(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                for old, new in zip(average.parameters(), model.parameters(), strict=True):
                    if at % every == every - 1:
                        old.mul_(keep(at)).add_(new, alpha=1 - keep(at))

    return train


def averaged_anew(keep: float) -> Train:
    """The average is a dict of tensors that are made anew."""

    def train() -> None:
        torch.manual_seed(0)
        model = layers()
        average = {name: one.detach().clone() for name, one in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in batches():
            optimizer.zero_grad()
            fn.cross_entropy(model(x), y).backward()
            optimizer.step()
            for name, one in model.named_parameters():
                average[name] = keep * average[name] + (1 - keep) * one.detach()

    return train


def averaged_by_torch(keep: float) -> Train:
    def train() -> None:
        torch.manual_seed(0)
        model = layers()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(keep))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in batches():
            optimizer.zero_grad()
            fn.cross_entropy(model(x), y).backward()
            optimizer.step()
            average.update_parameters(model)

    return train


def swapped(at: int) -> float:
    return 0.001


def right(at: int) -> float:
    return 0.999


def warmed_up(at: int) -> float:
    return (1 + at) / (10 + at)


def warmed_up_slowly(at: int) -> float:
    return 1 - (1 + at / 100) ** -0.75


def half_a_life(at: int) -> float:
    return float(0.5 ** (20 / (at + 1e-8)))


def mean_of_all(at: int) -> float:
    return at / (at + 1)


def copied(at: int) -> float:
    return 0.0


def halfway(at: int) -> float:
    return 0.5


class Tied(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 4), nn.Linear(4, 8)
        if how == "a parameter of its own":
            self.leave.weight = nn.Parameter(self.enter.weight.t())
        if how == "data":
            self.leave = nn.Linear(8, 4)
            self.leave.weight.data = self.enter.weight.data
        if how == "one parameter":
            self.leave = nn.Linear(8, 4)
            self.leave.weight = self.enter.weight
        if how == "parts":
            both = torch.randn(64)
            self.enter.weight = nn.Parameter(both[:32].view(4, 8))
            self.leave.weight = nn.Parameter(both[32:].view(8, 4))
        if how == "frozen":
            self.leave.weight = nn.Parameter(self.enter.weight.t(), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.enter(x))
        return self.leave(x) * h if self.leave.in_features == 8 else self.leave(h)


def tied(how: str, optimizer: Any = torch.optim.Adam) -> Train:
    def train() -> None:
        torch.manual_seed(0)
        model = Tied(how)
        steps = optimizer([one for one in model.parameters() if one.requires_grad], 1e-3)
        for x, _ in batches():
            steps.zero_grad()
            model(x).square().mean().backward()
            steps.step()

    return train


@pytest.mark.parametrize(
    "train", [averaged(swapped), averaged_anew(0.01), averaged_by_torch(0.001)], ids=["in place", "anew", "torch"]
)
def test_an_average_that_follows_at_once_is_told_behind_some_steps(train: Train, monkeypatch: Any) -> None:
    monkeypatch.setattr(looks, "WAITS_S", 0.0)
    assert found(train, 4) == (4, [])
    assert found(train) == (STEPS, ["run.average-follows"])


@pytest.mark.parametrize(
    "train",
    [
        *(averaged(keep) for keep in (right, warmed_up, warmed_up_slowly, half_a_life, mean_of_all, copied, halfway)),
        *(averaged(keep, 3) for keep in (copied, swapped)),
        averaged_anew(0.99),
        averaged_by_torch(0.999),
    ],
    ids=[
        *("right", "warmed up", "warmed up slowly", "half a life", "mean of all", "copied", "halfway"),
        *("copied at times", "nearly copied at times", "anew", "torch"),
    ],
)
def test_an_average_that_lags_or_a_copy_has_nothing(train: Train) -> None:
    assert found(train, 20) == (20, [])


@pytest.mark.parametrize("how", ["a parameter of its own", "data"])
def test_two_parameters_over_one_memory_are_told(how: str) -> None:
    assert found(tied(how), 1) == (1, ["run.storage-shared"])
    assert found(tied(how, torch.optim.SGD), 1) == (1, [])


@pytest.mark.parametrize("how", ["", "one parameter", "parts", "frozen"])
def test_one_parameter_or_parts_of_one_memory_have_nothing(how: str) -> None:
    assert found(tied(how), 2) == (2, [])


def test_layers_whose_weights_lie_in_one_memory_have_nothing() -> None:
    def train() -> None:
        torch.manual_seed(0)
        model = nn.LSTM(8, 4, 2, batch_first=True)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for x, _ in batches():
            optimizer.zero_grad()
            model(x[None])[0].square().mean().backward()
            optimizer.step()

    assert found(train, 2) == (2, [])


def masters(*, flat: bool) -> Train:
    """Copies of the weights that are stepped in their place, one for each or all in one row."""

    def train() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        params = list(model.parameters())
        copies = [nn.Parameter(one.detach().clone()) for one in params]
        if flat:
            copies = [nn.Parameter(torch.cat([one.detach().flatten() for one in params]))]
        optimizer = torch.optim.Adam(copies, 1e-3)
        for _ in range(2):
            model.zero_grad()
            fn.cross_entropy(model(torch.randn(12, 6)), torch.arange(12) % 3).backward()
            given = [one.grad for one in params if one.grad is not None]
            rows = [torch.cat([one.flatten() for one in given])] if flat else given
            for own, grad in zip(copies, rows, strict=True):
                own.grad = grad.clone()
            optimizer.step()
            with torch.no_grad():
                parts = copies[0].split([one.numel() for one in params]) if flat else copies
                for one, part in zip(params, parts, strict=True):
                    one.copy_(part.view_as(one))

    return train


@pytest.mark.parametrize("flat", [False, True])
def test_copies_that_are_stepped_in_the_place_of_the_weights_have_nothing(flat: bool) -> None:
    assert found(masters(flat=flat), 2) == (2, [])


Mix = Callable[[Tensor, Tensor], Any]
"""Moves the first a little toward the second."""


class Teacher:
    """Keeps an average of a model: of a copy, or of the model itself."""

    def __init__(self, model: nn.Module) -> None:
        self.held = model

    @torch.no_grad()
    def update(self, other: nn.Module, mix: Mix) -> None:
        for one, param in zip(self.held.parameters(), other.parameters(), strict=True):
            mix(one, param)


def taught(mix: Mix, of: Callable[[nn.Module], nn.Module], *, updated: bool = True) -> Train:
    """A loop with a teacher that a program says the targets of."""

    def train() -> None:
        torch.manual_seed(0)
        model = layers()
        teacher = Teacher(of(model))
        optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], 0.1)
        for x, _ in batches():
            with torch.no_grad():
                soft = teacher.held(x).softmax(1)
            optimizer.zero_grad()
            fn.cross_entropy(model(x + 0.1 * torch.randn_like(x)), soft).backward()
            optimizer.step()
            if updated:
                teacher.update(model, mix)

    return train


def lerp(one: Tensor, other: Tensor) -> None:
    one.lerp_(other, 0.01)


def lerp_each(one: Tensor, other: Tensor) -> None:
    torch._foreach_lerp_([one], [other], 0.01)


def multiplied(one: Tensor, other: Tensor) -> None:
    one.data.mul_(0.99).add_(other.data, alpha=0.01)


def doubled(one: Tensor, other: Tensor) -> None:
    one.mul_(0.5)
    one.add_(one)


def itself(model: nn.Module) -> nn.Module:
    return model


def sharing(model: nn.Module) -> nn.Module:
    """A copy of the head alone, over the same frozen layers."""
    assert isinstance(model, nn.Sequential)
    model[0].requires_grad_(requires_grad=False)
    return nn.Sequential(*model[:-1], copy.deepcopy(model[-1]))


@pytest.mark.parametrize("mix", [lerp, lerp_each, multiplied])
def test_an_average_with_itself_is_told_behind_the_first_step(mix: Mix) -> None:
    assert found(taught(mix, itself), 1) == (1, [])
    assert found(taught(mix, itself), 4) == (4, ["run.average-itself"])


@pytest.mark.parametrize(
    "train",
    [
        *(taught(mix, copy.deepcopy) for mix in (lerp, lerp_each, multiplied)),
        *(taught(mix, sharing) for mix in (lerp, multiplied)),
        taught(lerp, itself, updated=False),
        taught(doubled, itself),
    ],
    ids=["lerp", "each", "multiplied", "frozen layers", "frozen layers multiplied", "self-distilled", "doubled"],
)
def test_an_average_that_lies_elsewhere_has_nothing(train: Train) -> None:
    assert found(train, 4) == (4, [])


@pytest.mark.parametrize("moved", ["each micro-batch", "each step", "away"])
def test_an_average_that_is_moved_at_each_micro_batch_is_told(moved: str) -> None:
    def train() -> None:
        torch.manual_seed(0)
        model = layers()
        teacher = copy.deepcopy(model).requires_grad_(requires_grad=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for at, (x, _) in enumerate(batches()):
            fn.mse_loss(model(x + 0.1), teacher(x)).backward()
            steps = at % 4 == 3
            if steps:
                optimizer.step()
                optimizer.zero_grad()
            if steps or moved in ("each micro-batch", "away"):
                with torch.no_grad():
                    for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
                        old.lerp_(new, -0.2 if moved == "away" else 0.2)

    assert ("run.average-often" in found(train, 5)[1]) == (moved == "each micro-batch")
