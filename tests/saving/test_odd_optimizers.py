"""Optimizers that torch's checkpoints make no room for: LBFGS, whose state is one thing, and SparseAdam."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prepkit as pk
from prepkit.findings import RunRefused


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 4, sparse=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(x)).square().mean()
        return out


def both(model: Words) -> list[torch.optim.Optimizer]:
    sparse = torch.optim.SparseAdam(list(model.embed.parameters()), lr=0.1)
    return [sparse, torch.optim.AdamW(model.head.parameters(), lr=0.1)]


def lbfgs(model: Words) -> torch.optim.Optimizer:
    model.embed.requires_grad_(requires_grad=False)
    return torch.optim.LBFGS(model.head.parameters(), lr=0.05, max_iter=3, line_search_fn="strong_wolfe")


def prepared(make: Any) -> Any:
    model = Words()
    return pk.apply(pk.build_plan(pk.Config(), model, optimizer=make(model)))


def step(ready: Any, closes: bool) -> None:
    def closure() -> Tensor:
        loss: Tensor = ready.model(torch.arange(8))
        ready.backward(loss)
        return loss

    if closes:
        ready.step(closure)
    else:
        closure()
        ready.step()


def weights(ready: Any) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in ready.unwrap().named_parameters()}


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("make", [both, lbfgs])
def test_what_is_resumed_goes_on_as_what_was_saved(make: Any, before: int, tmp_path: Path) -> None:
    closes = make is lbfgs
    first = prepared(make)
    for _ in range(before):
        step(first, closes)
    first.save(str(tmp_path))
    step(first, closes)
    second = prepared(make)
    step(second, closes)  # another state, which the checkpoint replaces
    second.resume(str(tmp_path))
    step(second, closes)
    expected, found = weights(first), weights(second)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_state_of_lbfgs_is_refused_by_another_optimizer_and_the_other_way_round(tmp_path: Path) -> None:
    ready = prepared(lbfgs)
    step(ready, closes=True)
    ready.save(str(tmp_path))
    other = prepared(lambda model: torch.optim.AdamW(lbfgs(model).param_groups[0]["params"]))
    with pytest.raises(RunRefused, match=r"checkpoint\.other-optimizer"):
        other.resume(str(tmp_path))
    step(other, closes=False)
    other.save(str(tmp_path / "other"))
    before = weights(ready)
    with pytest.raises(RunRefused, match=r"checkpoint\.other-optimizer"):
        ready.resume(str(tmp_path / "other"))
    assert all(torch.equal(value, before[name]) for name, value in weights(ready).items())
