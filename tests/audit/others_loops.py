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


# --- classes that are shown ---

NODES, CLASSES = 60, 3


class Graph(nn.Module):
    """Two rounds of messages, and what it says of a node itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.head, self.own = nn.Linear(width, 8), nn.Linear(8, CLASSES), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, near: Tensor) -> Tensor:
        x = fn.dropout(x, 0.1, self.training)
        return near @ self.head(torch.relu(near @ self.enter(x))) + self.own(x)


class Hears(nn.Module):
    """One round of messages of others alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, near: Tensor) -> Tensor:
        return near.fill_diagonal_(0) @ self.enter(x)


class Embeds(nn.Module):
    """Is told of classes by their numbers; one more is that of nodes that it is not told of."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inside = nn.Embedding(CLASSES + 1, 4), Graph(8)

    def forward(self, x: Tensor, told: Tensor, near: Tensor) -> Tensor:
        return self.inside(torch.cat([x, self.words(told)], 1), near)


def nodes() -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.Generator().manual_seed(3)
    near = (torch.rand(NODES, NODES, generator=seed) < 0.1).float() + torch.eye(NODES)
    x = torch.randn(NODES, 4, generator=seed)
    return x, torch.randint(CLASSES, (NODES,), generator=seed), near / near.sum(1, keepdim=True)


def given_classes(model: nn.Module, *, learned: slice, shown: slice = slice(0, 24), log: bool = False) -> None:
    """Of 40 nodes that have a class, some are ``shown``, and some ``learned``."""
    x, y, near = nodes()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        order = torch.randperm(40)
        bits = torch.zeros(NODES, CLASSES)
        bits[order[shown]] = fn.one_hot(y[order[shown]], CLASSES).float()
        out = model(torch.cat([x, bits], 1), near.clone())
        at = order[learned]
        steps(optimizer, fn.nll_loss(out.log_softmax(1)[at], y[at]) if log else fn.cross_entropy(out[at], y[at]))


def classes_of_what_is_learned(rank: int, world: int) -> None:
    given_classes(Graph(4 + CLASSES), learned=slice(0, 24))


def classes_of_all_that_train(rank: int, world: int) -> None:
    given_classes(Graph(4 + CLASSES), shown=slice(0, 40), learned=slice(20, 40), log=True)


def classes_of_others(rank: int, world: int) -> None:
    given_classes(Graph(4 + CLASSES), learned=slice(24, 40))


def classes_heard_by_others_alone(rank: int, world: int) -> None:
    given_classes(Hears(4 + CLASSES), learned=slice(0, 24))


def numbers(*, learned: slice) -> None:
    x, y, near = nodes()
    model = Embeds()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        order = torch.randperm(40)
        told = torch.full((NODES,), CLASSES)
        told[order[:24]] = y[order[:24]]
        out = model(x, told, near)
        steps(optimizer, fn.cross_entropy(out[order[learned]], y[order[learned]]))


def numbers_of_what_is_learned(rank: int, world: int) -> None:
    numbers(learned=slice(0, 20))


def numbers_of_others(rank: int, world: int) -> None:
    numbers(learned=slice(24, 40))


def classes_again(rank: int, world: int) -> None:
    """An autoencoder of bits, which is to give again what it is given."""
    model = nn.Sequential(nn.Linear(CLASSES, 2), nn.Linear(2, CLASSES))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        y = torch.randint(CLASSES, (40,))
        steps(optimizer, fn.cross_entropy(model(fn.one_hot(y, CLASSES).float()), y))


def classes_hidden_and_given_again(rank: int, world: int) -> None:
    """The same of bits of which some are hidden, which are learned."""
    model = nn.Sequential(nn.Linear(CLASSES + 4, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        y, hidden = torch.randint(CLASSES, (40,)), torch.arange(40) % 2 == 0
        bits = fn.one_hot(y, CLASSES).float() * ~hidden[:, None]
        out = model(torch.cat([bits, torch.randn(40, 4)], 1))
        steps(optimizer, fn.cross_entropy(out, torch.where(hidden, y, -100)))


# --- batches of no loader ---


class Pools(nn.Module):
    """Weighs places by a softmax, or by mistake samples."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weighs, self.head, self.dim = nn.Linear(4, 1), nn.Linear(4, 3), dim

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x * self.weighs(x).softmax(self.dim)).sum(1))


def drawn(model: nn.Module, table: Tensor) -> None:
    y = torch.arange(len(table)) % 3
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        places = torch.randint(len(table), (12,))
        steps(optimizer, fn.cross_entropy(model(table[places]), y[places]))


def samples_weighed_by_each_other(rank: int, world: int) -> None:
    drawn(Pools(0), torch.randn(40, 7, 4))


def places_weighed_by_each_other(rank: int, world: int) -> None:
    drawn(Pools(1), torch.randn(40, 7, 4))


class AlongEdges(nn.Module):
    """Means over the nodes that edges lead from."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.head(x + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]))


def nodes_with_neighbours_that_were_drawn(rank: int, world: int) -> None:
    table, y, model = torch.randn(40, 4), torch.arange(40) % 3, AlongEdges()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        places = torch.randperm(40)[:12]
        steps(optimizer, fn.cross_entropy(model(table[places], torch.randint(12, (2, 30))), y[places]))


class Mixes(nn.Module):
    """A layer of a transformer over sequences, and one output for each."""

    def __init__(self, places: int, *, batch_first: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
        self.head, self.places = nn.Linear(8, 3), places

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(self.places))


def made(model: nn.Module, *shape: int) -> None:
    """Batches that are made as they are needed, of 12 samples."""
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        steps(optimizer, fn.cross_entropy(model(torch.randn(*shape, 8)), torch.randint(3, (12,))))


def sequences_mixed_as_places(rank: int, world: int) -> None:
    made(Mixes(1, batch_first=False), 12, 7)


def sequences_with_places_first(rank: int, world: int) -> None:
    made(Mixes(0, batch_first=False), 7, 12)


def sequences_with_samples_first(rank: int, world: int) -> None:
    made(Mixes(1, batch_first=True), 12, 7)


# --- two views of each sample ---


def contrasted(*, in_turn: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        things = torch.randn(10, 1, 16)
        views = things + 0.3 * torch.randn(10, 2, 16)
        views = views.flatten(0, 1) if in_turn else views.transpose(0, 1).flatten(0, 1)
        said = fn.normalize(model(views), dim=1)
        likeness = (said @ said.T / 0.2).masked_fill(torch.eye(20, dtype=torch.bool), -torch.inf)
        steps(optimizer, fn.cross_entropy(likeness, torch.arange(20).roll(10)))


def views_in_turn(rank: int, world: int) -> None:
    contrasted(in_turn=True)


def views_behind_each_other(rank: int, world: int) -> None:
    contrasted(in_turn=False)


WRONG_OTHERS: tuple[Loop, ...] = (
    *(Loop(run, rule="run.samples-mix") for run in (samples_weighed_by_each_other, sequences_mixed_as_places)),
    Loop(views_in_turn, rule="run.views-apart"),
    Loop(recurs_over_samples, rule="run.samples-mix"),
    *(
        Loop(run, rule="run.module-unheld")
        for run in (weights_in_a_variable, weights_of_an_object, weights_in_a_list_of_an_object)
    ),
    *(
        Loop(run, rule="run.target-given")
        for run in (classes_of_what_is_learned, classes_of_all_that_train, numbers_of_what_is_learned)
    ),
)
RIGHT_OTHERS: tuple[Loop, ...] = (
    *map(Loop, (places_weighed_by_each_other, sequences_with_places_first, sequences_with_samples_first)),
    *map(Loop, (views_behind_each_other, nodes_with_neighbours_that_were_drawn)),
    *map(Loop, (recurs_over_places, recurs_over_places_first, recurs_over_places_in_order)),
    *map(Loop, (says_something_of_each_place, images_as_large_as_a_batch, samples_with_neighbours)),
    *map(Loop, (weights_that_are_held, weights_held_later, weights_added_later, weights_that_rest)),
    *map(Loop, (moved_inside, classes_of_others, classes_heard_by_others_alone, numbers_of_others, classes_again)),
    Loop(classes_hidden_and_given_again),
)
