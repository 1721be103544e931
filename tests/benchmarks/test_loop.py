"""The benchmark of the loop still drives both loops; its figures are made by the command. Held here are counts."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader

import prepkit as pk
from prepkit.auditing import course
from prepkit.court import HOME
from prepkit.training import loop as driven
from tests.benchmarks import loop

CALLS = 57
"""Calls of prepkit's own Python functions in a micro-batch, loader and ends of windows included. They make the time
that its loop adds: a call and what it does takes a microsecond or two, and counts are the same on a busy machine."""
LEARNT = 6
"""Passes of five batches after which all turns are known: how many micro-batches a batch makes is usual by then."""


def calls(windows: Iterator[None], count: int) -> Counter[str]:
    """Functions of prepkit that were called in so many windows, and how often; named tuples are made without a file."""
    made: Counter[str] = Counter()

    def hear(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and (code.co_filename.startswith(HOME) or frame.f_globals["__name__"].startswith("named")):
            made[code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(hear)
    try:
        for _ in range(count):
            next(windows)
    finally:
        sys.setprofile(before)
    return made


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks and watches that other tests of this process have left, for the steps of any optimizer, are not its own."""
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        monkeypatch.setattr(optimizers, name, OrderedDict())
    if torch.autograd.backward is course._followed:
        monkeypatch.setattr(torch.autograd, "backward", course._BACKWARD[0])


@pytest.mark.usefixtures("alone")
def test_a_micro_batch_takes_few_calls() -> None:
    trained = loop.model(4)
    optimizer, scheduler = loop.optimized(trained)
    loaders: Any = [DataLoader(loop.data(4), batch_size=loop.ROWS, shuffle=True)]
    cfg = pk.Config(engine=pk.Single(), accumulation=loop.WINDOW, clip=pk.ClipNorm(loop.LIMIT))
    ready = pk.apply(pk.build_plan(cfg, trained, optimizer=optimizer, scheduler=scheduler, loaders=loaders))
    windows = loop.prepared(ready, ready.loaders[0], weighed=False)
    for _ in range(17):  # what is due is asked in the first, second, fourth, eighth and sixteenth
        next(windows)
    made = calls(windows, 8)
    windows.close()  # type: ignore[attr-defined]  # a generator
    each = {name: times / (8 * loop.WINDOW) for name, times in made.most_common()}
    assert 0 < sum(each.values()) <= CALLS, f"{sum(each.values()):.1f} calls in each micro-batch: {each}"


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_loop_that_goes_on_as_before_is_looked_up(accumulation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From pass to pass as well: what counts on would be worked out anew in each."""
    asked: list[Any] = []

    def advance(plan: Any, state: Any, event: Any) -> Any:
        asked.append(event)
        return real(plan, state, event)

    real = driven.advance
    monkeypatch.setattr(driven, "advance", advance)
    loaders: Any = [DataLoader(loop.data(4)[: 5 * loop.ROWS], batch_size=loop.ROWS)]
    cfg = pk.Config(optimizer=pk.optim.SGD(lr=0.1), accumulation=accumulation)
    ready = pk.apply(pk.build_plan(cfg, nn.Linear(4, 10), loaders=loaders))
    for turn in range(LEARNT + 3):
        before = len(asked)
        for inputs, labels in ready.loaders[0]:
            ready.backward(loop.cross_entropy(ready.model(inputs), labels))
            ready.step()
        assert turn < LEARNT or len(asked) == before, f"{asked[before:]} in pass {turn}"


def test_both_loops_of_the_benchmark_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "WINDOWS", 1)
    found = loop.measure("single", 8)
    assert {"prepkit", "mean_over", "ms"} <= set(found)
    assert all(figure > 0 for figure in found.values())
