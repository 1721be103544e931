"""Random numbers that come again in a training, and trainings that draw others each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from prepkit.auditing.script import audit_run

Train = Callable[[], None]
WIDTH = 8
EVERY = 3


def said(train: Train, steps: int = 40) -> list[str]:
    """Rules of what is above a note."""
    found = audit_run(train, steps=steps)
    assert found is not None
    return [one.rule for one in found.findings if one.severity.name != "NOTE"]


def net(*, drops: float = 0.2) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(drops), nn.Linear(16, 3))


def learn(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    fn.cross_entropy(model(x), torch.arange(len(x)) % 3).backward()
    optimizer.step()


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)


def seeds_again(model: nn.Module) -> None:
    seed_all(7)
    model(torch.randn(4, WIDTH))


def seeds_aside(model: nn.Module) -> None:
    with torch.random.fork_rng():
        seeds_again(model)


def gives_back(model: nn.Module) -> None:
    state = torch.get_rng_state()
    seeds_again(model)
    torch.set_rng_state(state)


def draws_aside(model: nn.Module) -> None:
    model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(7)))


def evaluated(judges: Callable[[nn.Module], None], *, drops: float = 0.2) -> Train:
    """Looks at a model every few steps."""

    def train() -> None:
        seed_all(0)
        model = net(drops=drops)
        optimizer, x = torch.optim.Adam(model.parameters(), 1e-3), torch.randn(6, WIDTH)
        for at in range(20):
            learn(model, optimizer, x)
            if at % EVERY == EVERY - 1:
                model.eval()
                with torch.no_grad():
                    judges(model)
                model.train()

    return train


def by_epoch(number: Callable[[int], int]) -> Train:
    """Seeds before each epoch."""

    def train() -> None:
        model = net()
        optimizer, x = torch.optim.Adam(model.parameters(), 1e-3), torch.randn(6, WIDTH)
        for epoch in range(6):
            torch.manual_seed(number(epoch))
            for _ in range(EVERY):
                learn(model, optimizer, x)

    return train


def folds(*, optimizers: bool) -> Train:
    """One seed for the training of each fold; of one optimizer, which is set back then, as the model is."""

    def train() -> None:
        model, x = net(), torch.randn(6, WIDTH)
        first = {name: one.clone() for name, one in model.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in range(4):
            torch.manual_seed(3)
            model.load_state_dict(first)
            optimizer = torch.optim.SGD(model.parameters(), 1e-3) if optimizers else optimizer
            for _ in range(EVERY):
                learn(model, optimizer, x)

    return train


def sharpness() -> None:
    """Two forwards of each step drop the same."""
    model = net()
    optimizer, x = torch.optim.SGD(model.parameters(), 1e-3), torch.randn(6, WIDTH)
    for _ in range(12):
        state = torch.get_rng_state()
        fn.cross_entropy(model(x), torch.arange(6) % 3).backward()
        moved = [0.05 * one.grad for one in model.parameters() if one.grad is not None]
        with torch.no_grad():
            torch._foreach_add_([*model.parameters()], moved)
        torch.set_rng_state(state)
        optimizer.zero_grad()
        fn.cross_entropy(model(x), torch.arange(6) % 3).backward()
        with torch.no_grad():
            torch._foreach_sub_([*model.parameters()], moved)
        optimizer.step()
        optimizer.zero_grad()


def by_two_forwards() -> None:
    """Perturbs by what a seed draws, twice each step, and writes the gradient itself."""
    model, x, seeds = net(drops=0.0), torch.randn(6, WIDTH), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def moves(seed: int, by: float) -> None:
        torch.manual_seed(seed)
        for one in model.parameters():
            one.data.add_(torch.randn_like(one), alpha=by)

    with torch.no_grad():
        for _ in range(12):
            seed = int(torch.randint(2**31, (), generator=seeds))
            losses = []
            for by in (1e-3, -2e-3):
                moves(seed, by)
                losses.append(fn.cross_entropy(model(x), torch.arange(6) % 3))
            moves(seed, 1e-3)
            torch.manual_seed(seed)
            for one in model.parameters():
                one.grad = torch.randn_like(one) * (losses[0] - losses[1]) / 2e-3
            optimizer.step()


def recomputed() -> None:
    model = net()
    optimizer, x = torch.optim.SGD(model.parameters(), 1e-3), torch.randn(6, WIDTH)
    for _ in range(12):
        optimizer.zero_grad()
        fn.cross_entropy(checkpoint(model, x, use_reentrant=False), torch.arange(6) % 3).backward()
        optimizer.step()


class Drawn(Dataset[Tensor]):
    """Items that are drawn when they are read."""

    def __init__(self, *, by_item: bool) -> None:
        self.by_item = by_item

    def __len__(self) -> int:
        return 12

    def __getitem__(self, at: int) -> Tensor:
        if self.by_item or not at:
            torch.manual_seed(at)
        return torch.randn(WIDTH)


def generated() -> Iterator[Tensor]:
    torch.manual_seed(5)
    for _ in range(EVERY):
        yield torch.randn(4, WIDTH)


def reads(data: Callable[[], Any]) -> Train:
    """Epochs over what is drawn anew each time."""

    def train() -> None:
        model = net(drops=0.0)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in range(5):
            for x in data():
                learn(model, optimizer, x)

    return train


@pytest.mark.parametrize(
    "train",
    [evaluated(seeds_again), by_epoch(lambda epoch: 3), by_epoch(lambda epoch: epoch % 2)],
    ids=["by an evaluation", "by each epoch", "by each second epoch"],
)
def test_draws_that_come_again_are_told(train: Train) -> None:
    assert said(train) == ["run.reseeded-steps"]


def test_the_line_that_asks_for_it_is_named_with_how_often() -> None:
    found = audit_run(evaluated(seeds_again), steps=40)
    assert found is not None
    (told,) = found.findings
    assert told.where == f"test_draws.py:{seeds_again.__code__.co_firstlineno + 1}"
    assert f"seeds torch with 7 every {EVERY} steps" in told.what
    assert "fork_rng" in told.fix


@pytest.mark.parametrize(
    "train",
    [
        evaluated(seeds_aside),
        evaluated(gives_back),
        evaluated(draws_aside),
        evaluated(seeds_again, drops=0.0),
        by_epoch(lambda epoch: epoch),
        folds(optimizers=True),
        folds(optimizers=False),
        sharpness,
        by_two_forwards,
        recomputed,
        reads(lambda: DataLoader(Drawn(by_item=True), batch_size=4)),
        reads(lambda: DataLoader(Drawn(by_item=False), batch_size=4)),
        reads(generated),
    ],
    ids=[
        *("forked", "given back", "a generator of its own", "nothing drawn", "another seed each time", "folds"),
        *("one optimizer set back", "two forwards of one state", "perturbed by a seed", "recomputed"),
        *("items by a seed each", "items by one seed", "a generator of samples"),
    ],
)
def test_a_training_that_draws_others_is_right(train: Train) -> None:
    assert said(train) == []
