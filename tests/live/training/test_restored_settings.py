"""Who resumes with other settings of the optimizer is told that the old ones count."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import prepkit as pk


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
