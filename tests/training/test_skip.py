"""A batch that is left out by ``ready.skip()`` trains as plain torch trains without it, under every engine."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

import prepkit as pk
from prepkit.config import Engine
from prepkit.findings import RunRefused
from tests.support.deepspeed_cpu import lean
from tests.support.gang import Gang

READERS = 2
STEPS = 5
LEFT_OUT = {1: "before its backward", 3: "after its backward"}
"""Batches that are not trained on, and where each is left."""
PROBE = torch.ones(1, 4)
ENGINES: dict[str, Engine] = {
    "DDP": pk.DDP(),
    "FSDP1": pk.FSDP1(wrap=pk.wrap.WrapPaths(("0", "2"))),
    "FSDP2": pk.FSDP2(wrap=pk.wrap.WrapPaths(("0", "2"))),
    "ZeRO 0": pk.DeepSpeed(stage=0, micro_batch=3),
    "ZeRO 2": pk.DeepSpeed(stage=2, micro_batch=3),
    "ZeRO 3": pk.DeepSpeed(stage=3, micro_batch=3),
}


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(step: int, reader: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + reader))


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


@cache
def expected() -> list[float]:
    """One process that has the batches of both readers, and never those that are left out."""
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.05)
    for step in range(STEPS):
        if step not in LEFT_OUT:
            loss_of(trained(torch.cat([batch(step, reader) for reader in range(READERS)]))).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [round(value, 5) for value in trained(PROBE)[0].tolist()]


def trained(rank: int, world: int, name: str, tokens: bool) -> list[float]:
    """The same by prepkit; ``tokens``: losses are weighed, and what is left out would count a hundred times."""
    engine = ENGINES[name]
    if isinstance(engine, pk.DeepSpeed):
        lean()
    ready = pk.apply(pk.build_plan(pk.Config(engine=engine, optimizer=pk.optim.AdamW(lr=0.05)), model()))
    for step in range(STEPS):
        loss = loss_of(ready.model(batch(step, rank)))
        where = LEFT_OUT.get(step, "")
        if where != "before its backward":
            ready.backward(loss, **({"mean_over": 300 if where else 3} if tokens else {}))
        if where:
            ready.skip()
        else:
            ready.step()
    return [round(value, 5) for value in ready.model(PROBE)[0].tolist()]


@pytest.mark.parametrize("tokens", [False, True], ids=["", "weighed"])
@pytest.mark.parametrize("name", ENGINES)
def test_what_is_skipped_is_trained_nowhere(gang2: Gang, name: str, tokens: bool) -> None:
    one, other = gang2.run(trained, name, tokens)
    assert one == other == pytest.approx(expected(), abs=2e-4)


def test_inside_a_window_a_backward_cannot_be_taken_back() -> None:
    ready = pk.apply(pk.build_plan(pk.Config(accumulation=2, optimizer=pk.optim.AdamW()), model()))
    ready.backward(loss_of(ready.model(batch(0, 0))))
    ready.step()
    ready.skip()  # nothing has been added: a batch whose forward failed
    ready.backward(loss_of(ready.model(batch(1, 0))))
    with pytest.raises(RunRefused, match=r"loop\.skipped-inside-window"):
        ready.skip()
    assert ready.step()
