"""Who resumes with other settings of the optimizer is told that the old ones count."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import nn

import prepkit as pk
from prepkit.live.checkpoints.other_windows import differing
from prepkit.steps import Axis


def prepared(lr: float, weight_decay: float = 0.01, horizon: int = 10) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=horizon)
    return pk.apply(pk.build_plan(pk.Config(), model, optimizer=optimizer, scheduler=scheduler))


def resumed(folder: Path, ready: Any, **options: Any) -> list[str]:
    """What is said, at the line that resumes."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        ready.resume(str(folder), **options)
    ours = [one for one in heard if "ready.resume()" in str(one.message)]
    assert all(one.filename == __file__ for one in ours)
    return [str(one.message) for one in ours]


def test_settings_that_a_resume_replaces_are_told_and_those_that_it_keeps_are_not(tmp_path: Path) -> None:
    ready = prepared(0.1)
    for _ in range(2):
        ready.backward(ready.model(torch.ones(2, 4)).sum())
        ready.step()
    ready.save(str(tmp_path))
    assert resumed(tmp_path, prepared(0.1)) == [], "a rate that the scheduler has moved is the checkpoint's"
    other = prepared(0.2, weight_decay=0.5)
    (told,) = resumed(tmp_path, other)
    assert "lr of group 0: 0.1 for 0.2; weight_decay of group 0: 0.01 for 0.5" in told
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.01
    fresh = prepared(0.2)
    assert resumed(tmp_path, fresh, only_model=True) == []
    assert fresh.optimizer.param_groups[0]["initial_lr"] == 0.2
    (told,) = resumed(tmp_path, prepared(0.1, horizon=20))
    assert "had: the scheduler's T_max: 10 for 20. To" in told


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "behind another"])
def test_betas_that_a_scheduler_cycles_are_nobody_s_setting(tmp_path: Path, inside: bool) -> None:
    def cycled() -> Any:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
        if inside:
            scheduler = torch.optim.lr_scheduler.ChainedScheduler([scheduler], optimizer=optimizer)
        return pk.apply(pk.build_plan(pk.Config(), model, optimizer=optimizer, scheduler=scheduler))

    ready = cycled()
    for _ in range(3):
        ready.backward(ready.model(torch.ones(2, 4)).sum())
        ready.step()
    ready.save(str(tmp_path))
    assert resumed(tmp_path, cycled()) == []


def planned(**settings: Any) -> Any:
    torch.manual_seed(0)
    return pk.build_plan(pk.Config(optimizer=pk.AdamW(), **settings), nn.Linear(4, 4))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "prepkit"]


def test_windows_and_clipping_that_are_not_the_checkpoint_s_are_told_with_what_to_type(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pk.apply(planned(accumulation=2, clip=pk.ClipNorm(1.0))).save(str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="prepkit"):
        pk.apply(planned(accumulation=2, clip=pk.ClipNorm(1.0))).resume(str(tmp_path))
        pk.apply(planned(accumulation=3)).resume(str(tmp_path), only_model=True)
        assert said(caplog) == [], "the same, or weights alone"
        pk.apply(planned(accumulation=3)).resume(str(tmp_path))
    (told,) = said(caplog)
    assert told.startswith("resume: this run's plan counts, and is not the checkpoint's: a step takes 3 micro-batches")
    assert "and took 2 micro-batches on each of 1 data rank; clipping is NoClip(), and was ClipNorm(" in told
    assert "write Config(accumulation=2, clip=pk.ClipNorm(max_norm=1.0, norm_type=2.0))" in told


def test_the_same_batch_over_other_ranks_is_no_news() -> None:
    one, two = planned(accumulation=4), planned(accumulation=2)
    pair = evolve(two, mesh=(Axis(name="replicate", size=2),))
    assert differing(one, pair) == ""
    assert "a step takes 2 micro-batches on each of 1 data rank" in differing(pair, two)
    samples = evolve(one.config, global_batch=8)
    assert differing(evolve(one, config=samples), evolve(two, config=samples)) == ""
    three = evolve(two, mesh=(Axis(name="replicate", size=3),))
    assert "To train on" not in differing(one, three), "no number gives as many"
