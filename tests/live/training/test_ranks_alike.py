"""Ranks that no longer train alike, or train on what is no number, hear of it in one of the first windows."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import prepkit as pk
from prepkit.live.training.loop_order import LoopOutOfOrder
from tests.support.gang import Gang


def prepared(engine: Any, **given: Any) -> Any:
    torch.manual_seed(0)
    return pk.apply(pk.build_plan(pk.Config(engine=engine, optimizer=pk.AdamW(lr=0.1)), nn.Linear(4, 4), **given))


def window(ready: Any, value: float = 1.0) -> None:
    ready.backward(ready.model(torch.full((2, 4), value)).square().mean())
    ready.step()


def own_rates(rank: int, world: int, engine: Any) -> tuple[str, bool]:
    """What is raised when each rank has set a rate of its own, and whether the step was taken."""
    del world
    ready = prepared(engine)
    for _ in range(3):
        window(ready)
    ready.optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
    try:
        window(ready)
    except LoopOutOfOrder as error:
        return str(error), ready.steps == 3
    return "", False


@pytest.mark.parametrize("engine", [pk.DDP(), pk.FSDP2()], ids=["ddp", "fsdp2"])
def test_rates_that_differ_over_ranks_are_refused_on_all_of_them(gang2: Gang, engine: Any) -> None:
    for told, same in gang2.run(own_rates, engine, timeout=60):
        assert "the optimizer has other settings on other ranks: lr of group 0 from 0.1 to 0.2" in told
        assert "give it ready.reduce(metric)" in told
        assert same


def passes(rank: int, world: int) -> list[tuple[bool, bool]]:
    """Whether a warning of passes is heard, and points here: where ranks end passes together, and where not."""
    del world
    found = []
    for leaves in (False, True):
        ready: Any = prepared(pk.DDP(), loaders=[DataLoader(torch.ones(16, 4), batch_size=2)])  # type: ignore[arg-type]
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            while ready.steps < 4:
                for batch in ready.loaders[0]:
                    ready.backward(ready.model(batch).square().mean())
                    ready.step()
                    if ready.steps == 4 or (leaves and rank == 0):
                        break
        said = [one for one in heard if "ranks are in different passes over their data" in str(one.message)]
        found.append((bool(said), all(one.filename == __file__ for one in said)))
    return found


def test_a_rank_that_leaves_a_pass_early_is_told_of(gang2: Gang) -> None:
    for together, apart in gang2.run(passes, timeout=60):
        assert together == (False, True)
        assert apart == (True, True)


def test_a_loss_that_is_no_number_is_told_once() -> None:
    ready = prepared(pk.Single())
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for value in (1.0, 1.0, float("nan"), 1.0, 1.0, 1.0, 1.0, 1.0):
            window(ready, value)
    (said,) = (str(one.message) for one in heard)
    assert said.startswith("the loss is not finite in window 4 on this rank")
