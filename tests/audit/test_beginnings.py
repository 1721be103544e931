"""States that go from batch to batch, which shows behind the first step alone; and programs that do so rightly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from prepkit.auditing.script import audit_run
from tests.audit.test_steps import found

STEPS = 5
Loader = Callable[[TensorDataset], DataLoader[Any]]
Kept = Callable[[Any], Any]


def drawn(data: TensorDataset) -> DataLoader[Any]:
    return DataLoader(data, batch_size=8, shuffle=True)


def by_rank(data: TensorDataset) -> DataLoader[Any]:
    return DataLoader(data, batch_size=8, sampler=DistributedSampler(data, num_replicas=1, rank=0))


def in_order(data: TensorDataset) -> DataLoader[Any]:
    return DataLoader(data, batch_size=8)


def rows() -> TensorDataset:
    x = torch.randn(8 * 3 * STEPS, 6, 2)
    return TensorDataset(x, x[:, :, 0].sum(1).tanh())


def detached(state: Any) -> Any:
    return tuple(one.detach() for one in state) if isinstance(state, tuple) else state.detach()


def carries(
    kind: type[nn.RNNBase], loader: Loader, *, kept: Kept = detached, anew: bool = False, parts: int = 1
) -> Callable[[], None]:
    """A state that the program hands on; ``parts``: of each batch, one after the other."""

    def train() -> None:
        torch.manual_seed(0)
        layer, head = kind(2, 12, batch_first=True), nn.Linear(12, 1)
        optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], 1e-3)
        state = None
        for x, y in loader(rows()):
            state = None if anew else state
            for part in x.chunk(parts, 1):
                out, state = layer(part, state)
                state = kept(state)
                optimizer.zero_grad()
                fn.mse_loss(head(out[:, -1]).squeeze(1), y).backward()
                optimizer.step()

    return train


class Remembers(nn.Module):
    """Its state is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(2, 12), nn.Linear(12, 1)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        state = self.state
        for step in x.unbind(1):
            state = self.cell(step, state)
        assert state is not None
        self.state = state.detach()
        return self.head(state).squeeze(1)


def remembers(loader: Loader, *, forgets: bool = False, streams: bool = False) -> Callable[[], None]:
    """``streams``: what it reads comes from elsewhere, in order, and the loader gives other things."""

    def train() -> None:
        torch.manual_seed(0)
        model = Remembers()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for x, y in loader(rows()):
            if forgets:
                model.state = None
            given, goal = (torch.randn(3, 6, 2), torch.randn(3)) if streams else (x, y)
            optimizer.zero_grad()
            fn.mse_loss(model(given), goal).backward()
            optimizer.step()

    return train


def evaluated() -> None:
    """Stateful where it evaluates, in order, between steps over shuffled samples."""
    torch.manual_seed(0)
    model = Remembers()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for x, y in drawn(rows()):
        model.train()
        model.state = None
        optimizer.zero_grad()
        fn.mse_loss(model(x), y).backward()
        optimizer.step()
        model.eval()
        model.state = None
        with torch.no_grad():
            for one, _ in in_order(TensorDataset(*(part[:24] for part in rows().tensors))):
                model(one)


@pytest.mark.parametrize(
    "train",
    [
        *(carries(kind, drawn) for kind in (nn.LSTM, nn.GRU, nn.RNN)),
        carries(nn.LSTM, drawn, kept=lambda state: tuple(one.data for one in state)),
        carries(nn.GRU, by_rank),
        remembers(drawn),
    ],
    ids=["LSTM", "GRU", "RNN", "data", "by rank", "cell"],
)
def test_a_state_that_goes_from_one_shuffled_batch_to_the_next_is_told(train: Callable[[], None]) -> None:
    assert found(train, 1) == (1, [])
    assert found(train, STEPS) == (STEPS, ["run.state-carried"])


@pytest.mark.parametrize(
    "train",
    [
        carries(nn.LSTM, in_order),
        carries(nn.LSTM, drawn, anew=True),
        carries(nn.LSTM, drawn, anew=True, parts=3),
        carries(nn.GRU, drawn, kept=torch.zeros_like),
        *(remembers(in_order), remembers(drawn, forgets=True), remembers(drawn, streams=True)),
        evaluated,
    ],
    ids=["in order", "anew", "parts of a batch", "zeros", "cell in order", "cell anew", "streams", "evaluated"],
)
def test_a_state_that_stays_in_its_stream_has_nothing(train: Callable[[], None]) -> None:
    assert found(train, STEPS) == (STEPS, [])


class Says(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.LSTM(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)[0]


def test_layers_are_as_they_were_and_can_be_scripted_meanwhile() -> None:
    plain = (
        nn.LSTM.forward,
        nn.GRUCell.forward,
        nn.ModuleList.extend,
        vars(nn.Sequential)["__init__"],
        torch.jit.script,
    )

    def train() -> None:
        model = nn.Sequential(torch.jit.script(Says()))  # type: ignore[no-untyped-call]  # torch
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.randn(3, 4, 2)).square().mean().backward()
        assert nn.LSTM.forward is not plain[0]
        optimizer.step()

    def raises() -> None:
        raise RuntimeError("full")

    assert audit_run(train) is not None
    with pytest.raises(RuntimeError, match="full"):
        audit_run(raises)
    now = (nn.LSTM.forward, nn.GRUCell.forward, nn.ModuleList.extend, vars(nn.Sequential)["__init__"], torch.jit.script)
    assert now == plain
