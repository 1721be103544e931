"""Loops in which samples hear of each other, of their targets, or of what nobody steps; and their right twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from tests.audit.loops import Loop
from tests.audit.sequences import BATCH, trained

# --- batches as long as their samples, and as wide as layers ---


class Recurs(nn.Module):
    """A recurrence as wide as the batch is long."""

    def __init__(self, says: Callable[[Tensor], Tensor], *, batch_first: bool, classes: int = 3) -> None:
        super().__init__()
        self.enter, self.says = nn.Linear(4, BATCH), says
        self.cells = nn.LSTM(BATCH, BATCH, 2, batch_first=batch_first, dropout=0.1)
        self.head = nn.Linear(BATCH, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.says(self.cells(torch.relu(self.enter(x)))[0]))


def square(model: nn.Module, turned: Callable[[Tensor], Tensor] = lambda x: x, *shape: int) -> None:
    """Samples of as many places as a batch has of them."""
    x = torch.randn(4 * BATCH, BATCH, *(shape or (4,)), generator=torch.Generator().manual_seed(5))
    y = torch.arange(len(x)) % 3

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        out = model(turned(batch[0]))
        return fn.cross_entropy(out if out.dim() == 2 else out.mean(0 if turned(x) is not x else 1), batch[1])

    trained(model, loss_of, x, y)


def recurs_over_samples(rank: int, world: int) -> None:
    square(Recurs(lambda out: out[:, -1], batch_first=False))


def recurs_over_places(rank: int, world: int) -> None:
    square(Recurs(lambda out: out[:, -1], batch_first=True))


def recurs_over_places_first(rank: int, world: int) -> None:
    square(Recurs(lambda out: out[-1], batch_first=False), lambda x: x.transpose(0, 1))


def recurs_over_places_in_order(rank: int, world: int) -> None:
    square(Recurs(lambda out: out[-1], batch_first=False), lambda x: x.transpose(0, 1).contiguous())


def says_something_of_each_place(rank: int, world: int) -> None:
    square(Recurs(lambda out: out, batch_first=False), lambda x: x.transpose(0, 1).contiguous())


class SquareImages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.look, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.look(x[:, None])).mean((2, 3)))


def images_as_large_as_a_batch(rank: int, world: int) -> None:
    square(SquareImages(), lambda x: x, BATCH)


class Neighbours(nn.Module):
    """Each sample hears of others that it is told to be near to."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, near: Tensor) -> Tensor:
        return self.head(near @ torch.relu(self.enter(x)))


def samples_with_neighbours(rank: int, world: int) -> None:
    x = torch.randn(4 * BATCH, 4, generator=torch.Generator().manual_seed(5))

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        near = torch.cdist(x, x)
        return fn.cross_entropy(model(x, (near < near.median()).float()), y)

    trained(Neighbours(), loss_of, x, torch.arange(len(x)) % 3)


# --- parameters that stand in no module ---


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def two_losses(model: nn.Module) -> tuple[Tensor, Tensor]:
    out = model(torch.randn(8, 4))
    return fn.cross_entropy(out, torch.arange(8) % 3), out.square().mean()


def weighed(logs: Tensor, losses: tuple[Tensor, Tensor]) -> Tensor:
    return sum((torch.exp(-log) * one + log for log, one in zip(logs, losses, strict=True)), torch.zeros(()))


class Weights:
    """Of losses, and no module."""

    def __init__(self) -> None:
        self.logs = nn.Parameter(torch.zeros(2))
        self.parts = [nn.Parameter(torch.zeros(()))]


def steps(optimizer: Any, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def weights_in_a_variable(rank: int, world: int) -> None:
    model, logs = net(), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        steps(optimizer, weighed(logs, two_losses(model)))


def weights_of_an_object(rank: int, world: int) -> None:
    model, weights = net(), Weights()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        steps(optimizer, weighed(weights.logs, two_losses(model)))


def weights_in_a_list_of_an_object(rank: int, world: int) -> None:
    model, weights = net(), Weights()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        one, other = two_losses(model)
        steps(optimizer, one + weights.parts[0].exp() * other)


def weights_that_are_held(rank: int, world: int) -> None:
    model, weights = net(), Weights()
    optimizer = torch.optim.Adam([*model.parameters(), weights.logs])
    for _ in range(3):
        steps(optimizer, weighed(weights.logs, two_losses(model)))


def weights_held_later(rank: int, world: int) -> None:
    model, weights, second = net(), Weights(), None
    optimizer = torch.optim.Adam(model.parameters())
    for at in range(3):
        steps(optimizer, weighed(weights.logs, two_losses(model)))
        if at == 1:
            second = torch.optim.SGD([weights.logs], 0.1)
        if second is not None:
            second.step()


def weights_added_later(rank: int, world: int) -> None:
    model, weights = net(), Weights()
    optimizer = torch.optim.Adam(model.parameters())
    for at in range(3):
        if at == 1:
            optimizer.add_param_group({"params": [weights.logs]})
        steps(optimizer, weighed(weights.logs, two_losses(model)))


def weights_that_rest(rank: int, world: int) -> None:
    model, weights = net(), Weights()
    weights.logs.requires_grad_(requires_grad=False)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        steps(optimizer, weighed(weights.logs, two_losses(model)))


def moved_inside(rank: int, world: int) -> None:
    """A parameter that is fitted anew to each batch, and what is made of it trains the model."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        shift = nn.Parameter(torch.zeros(4))
        x, y = torch.randn(8, 4), torch.arange(8) % 3
        (slope,) = torch.autograd.grad(fn.cross_entropy(model(x + shift), y), shift)
        steps(optimizer, fn.cross_entropy(model(x + (shift + 0.1 * slope.sign()).detach()), y))


WRONG_OTHERS: tuple[Loop, ...] = (
    Loop(recurs_over_samples, rule="run.samples-mix"),
    *(
        Loop(run, rule="run.module-unheld")
        for run in (weights_in_a_variable, weights_of_an_object, weights_in_a_list_of_an_object)
    ),
)
RIGHT_OTHERS: tuple[Loop, ...] = (
    *map(Loop, (recurs_over_places, recurs_over_places_first, recurs_over_places_in_order)),
    *map(Loop, (says_something_of_each_place, images_as_large_as_a_batch, samples_with_neighbours)),
    *map(Loop, (weights_that_are_held, weights_held_later, weights_added_later, weights_that_rest)),
    Loop(moved_inside),
)
