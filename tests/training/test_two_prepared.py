"""Two prepared models in one program keep their settings, their gradients and their counts apart."""

from __future__ import annotations

import pytest
import torch

import prepkit as pk

BATCH = torch.arange(8.0).reshape(2, 4)


def prepared(accumulation: int) -> pk.Prepared:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cfg = pk.Config(accumulation=accumulation, clip=pk.ClipNorm(0.5))
    return pk.apply(pk.build_plan(cfg, model, optimizer=optimizer))


def test_each_counts_its_own_micro_batches_whatever_a_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepared(3)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    second = prepared(1)
    stepped: dict[str, list[bool]] = {"first": [], "second": []}
    for _ in range(3):
        for name, ready in (("first", first), ("second", second)):
            ready.backward(ready.model(BATCH).sum())
            stepped[name].append(ready.step())
    assert stepped == {"first": [False, False, True], "second": [True, True, True]}
    assert (first.steps, second.steps) == (1, 3)


def test_a_step_of_one_clips_and_clears_no_gradient_of_the_other() -> None:
    first, second = prepared(1), prepared(2)
    second.backward(second.model(BATCH).sum())
    second.step()
    waiting = second.model.weight.grad
    assert isinstance(waiting, torch.Tensor)
    before = waiting.clone()
    first.backward(first.model(BATCH).sum())
    assert first.step()
    assert second.model.weight.grad is waiting
    assert torch.equal(waiting, before)
    assert float(before.norm()) > 0.5  # more than a step of the other would have left
