"""Penalties over weights, as docs/training-loop.md writes them: counted once, whatever the engine, in any order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import prepkit as pk
from tests.support.deepspeed_cpu import lean
from tests.support.gang import Gang

BLOCKS = pk.wrap.WrapClasses(("Block",))
INPUTS = torch.linspace(-1, 1, 64).reshape(4, 2, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Block(), Block(), nn.Linear(8, 1))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def l2(weights: nn.Module, _: Any) -> torch.Tensor:
    return torch.stack([whole(param.pow(2).sum()) for param in weights.parameters()]).sum()


def towards(weights: nn.Module, old: dict[str, torch.Tensor]) -> torch.Tensor:
    pairs = [(whole(param), old[name]) for name, param in weights.named_parameters()]
    return torch.stack([(param - before).pow(2).sum() for param, before in pairs]).sum()


PENALTIES = {"l2": l2, "towards": towards}


def losses(rank: int, world: int, engine: Any, penalty: str) -> list[float] | str:
    """The mean loss without the penalty after each step; what is noted where a backward fails."""
    lean()
    net = model()
    old = {name: param.detach().clone() for name, param in net.named_parameters()}
    config = pk.Config(engine=engine, device="cpu")
    ready = pk.apply(pk.build_plan(config, net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1)))
    found = []
    for _ in range(4):
        for x in INPUTS:
            loss = ready.model(x.chunk(world)[rank]).square().mean()
            if penalty == "mixed":
                loss = loss + sum(param.pow(2).sum() for param in ready.unwrap().parameters())
            else:
                loss = loss + 0.1 * PENALTIES[penalty](ready.unwrap(), old)
            try:
                ready.backward(loss)
            except RuntimeError as error:
                return "\n".join(getattr(error, "__notes__", ()))
            ready.step()
        with torch.no_grad():
            found.append(float(ready.model(INPUTS.reshape(-1, 8)).square().mean()))
    return found


def alone(penalty: str) -> list[float]:
    net = model()
    old = {name: param.detach().clone() for name, param in net.named_parameters()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for _ in range(4):
        for x in INPUTS:
            (net(x).square().mean() + 0.1 * PENALTIES[penalty](net, old)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(float(net(INPUTS.reshape(-1, 8)).detach().square().mean()))
    return found


ENGINES = {
    "ddp": pk.DDP(),
    "fsdp2": pk.FSDP2(wrap=BLOCKS),
    "zero2": pk.DeepSpeed(stage=2, micro_batch=1),
    "fsdp1": pk.FSDP1(wrap=BLOCKS),
}


@pytest.mark.parametrize(
    ("engine", "penalty"),
    [(engine, penalty) for engine in ENGINES for penalty in PENALTIES if (engine, penalty) != ("fsdp1", "towards")],
)
def test_a_penalty_counts_once(gang2: Gang, engine: str, penalty: str) -> None:
    for found in gang2.run(losses, ENGINES[engine], penalty, timeout=90):
        assert found == pytest.approx(alone(penalty), rel=1e-4)


def test_shards_that_are_added_to_whole_tensors_are_explained(gang2: Gang) -> None:
    for note in gang2.run(losses, ENGINES["fsdp2"], "mixed", timeout=60):
        assert "forward.used-elsewhere at loss: The loss adds up terms of weights that are whole" in note
        assert "term.full_tensor()" in note


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of = nn.RNN(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.of(x, hidden)[0]
        return out


def with_hidden(rank: int, world: int) -> list[str]:
    del rank, world
    config = pk.Config(engine=pk.FSDP2(), device="cpu", optimizer=pk.optim.SGD(lr=0.1))
    ready = pk.apply(pk.build_plan(config, Recurrent()))
    hidden = next(ready.unwrap().parameters()).new_zeros(1, 2, 8)
    try:
        ready.model(torch.ones(2, 4, 8), hidden)
    except RuntimeError as error:
        return list(getattr(error, "__notes__", ()))
    return []


def test_a_state_that_is_made_of_a_shard_is_explained(gang2: Gang) -> None:
    for (note,) in gang2.run(with_hidden, timeout=60):
        assert note.startswith("forward.used-elsewhere at model: A shard has met a whole tensor")
