"""A model that was asked once more is as it was, and what cannot be asked is left alone."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from prepkit.auditing.outcome import Audit
from prepkit.auditing.script import audit_run
from tests.audit.case import Case, adam
from tests.audit.sequences import BATCH, Layers
from tests.audit.test_audit import same, state_of


class Restless(nn.Module):
    """Counts, collects, draws and writes a buffer in each forward, in whatever mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.sizes, self.last = 0, list[int](), {"mean": torch.zeros(())}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.sizes.append(len(x))
        self.last["mean"] = x.mean()
        self.seen += 1  # type: ignore[operator]
        random.random()
        print("forward")
        return x + 0.01 * torch.rand(()) * 0


def audited(model: nn.Module, *, kept: list[Any]) -> Audit:
    """The audit of one step; ``kept`` gets what stood there before it looked."""
    optimizer = adam(model)

    def run() -> None:
        x = torch.randn(BATCH, 16)
        cross_entropy(model(x), torch.arange(BATCH) % 3).backward()
        kept[:] = [state_of(Case(model=model, optimizer=optimizer)), held(model)]
        optimizer.step()

    found = audit_run(run)
    assert found is not None
    kept.append(state_of(Case(model=model, optimizer=optimizer)))
    return found


def held(model: nn.Module) -> list[Any]:
    return [(one.calls, [*one.sizes], one.last["mean"]) for one in model.modules() if isinstance(one, Restless)]


def test_a_model_that_was_asked_is_as_it_was(capsys: Any) -> None:
    kept: list[Any] = []
    model = Layers(Restless())
    model.middle.train()
    audited(model, kept=kept)
    before, counted, after = kept
    del before["gradients"], after["gradients"]
    assert [name for name in before if not same(before[name], after[name])] == []
    assert same(held(model), counted)
    assert counted[0][0] == 1
    assert capsys.readouterr().out == "forward\n"


class Refuses(nn.Module):
    """Takes one batch, and computes by itself no more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            raise RuntimeError("not in evaluation mode")
        return self.inner(x) * torch.softmax(x, 0)


def test_a_model_that_cannot_be_asked_is_left_alone() -> None:
    found = audited(Layers(Refuses()), kept=[])
    assert [one.rule for one in found.findings if one.severity.value != "note"] == []
    assert found.facts.window is not None
    assert found.facts.window.forwards == ()
