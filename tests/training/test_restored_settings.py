"""Who resumes with other settings of the optimizer is told that the old ones count."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import nn

import prepkit as pk
from prepkit.facts.saved_run import ResumeFacts
from prepkit.findings import FindingWarning
from prepkit.rules import due
from prepkit.rules.rule import Moment, findings_of
from prepkit.saving.saved_facts import windows_of
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
    ours = [one for one in heard if one.category is FindingWarning]
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
    assert "had: the scheduler's T_max: 10 for 20\n  fix: To train on with yours" in told


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
    return pk.build_plan(pk.Config(optimizer=pk.optim.AdamW(), **settings), nn.Linear(4, 4))


def test_steps_of_as_many_samples_are_the_same_whatever_their_batches(tmp_path: Path) -> None:
    def reading(batch: int, accumulation: int) -> pk.Prepared:
        torch.manual_seed(0)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(48, 4)), batch_size=batch)
        cfg = pk.Config(optimizer=pk.optim.AdamW(), accumulation=accumulation)
        return pk.apply(pk.build_plan(cfg, nn.Linear(4, 4), loaders=[loader]))

    reading(4, 6).save(str(tmp_path))
    assert resumed(tmp_path, reading(8, 3)) == []
    (told,) = resumed(tmp_path, reading(8, 6))
    assert told.startswith("warning resume.other-batch at config.accumulation: a step takes 48 samples, and took 24")
    assert told.endswith("To train on as before, write Config(accumulation=3).")


def test_windows_and_clipping_that_are_not_the_checkpoint_s_are_reported_with_what_to_type(tmp_path: Path) -> None:
    pk.apply(planned(accumulation=2, clip=pk.ClipNorm(1.0))).save(str(tmp_path))
    assert resumed(tmp_path, pk.apply(planned(accumulation=2, clip=pk.ClipNorm(1.0)))) == []
    assert resumed(tmp_path, pk.apply(planned(accumulation=3)), only_model=True) == []
    batch, clipping = resumed(tmp_path, pk.apply(planned(accumulation=3)))
    assert batch == (
        "warning resume.other-batch at config.accumulation: a step takes 3 micro-batches on each of 1 data rank, and "
        "took 2 micro-batches on each of 1 data rank\n"
        "  fix: To train on as before, write Config(accumulation=2)."
    )
    assert clipping == (
        "warning resume.other-clipping at config.clip: clipping is off, and was ClipNorm(max_norm=1.0, norm_type=2.0)\n"
        "  fix: To train on as before, write Config(clip=pk.ClipNorm(max_norm=1.0, norm_type=2.0))."
    )


def differing(before: Any, now: Any) -> list[str]:
    facts = ResumeFacts(before=windows_of(before), now=windows_of(now))
    return [str(finding) for finding in findings_of(due(Moment.RESUME), facts)]


def test_the_same_batch_over_other_ranks_is_no_news() -> None:
    one, two = planned(accumulation=4), planned(accumulation=2)
    pair = evolve(two, mesh=(Axis(name="replicate", size=2),))
    assert differing(one, pair) == []
    (told,) = differing(pair, two)
    assert "a step takes 2 micro-batches on each of 1 data rank" in told
    samples = evolve(one.run, global_batch=8)
    assert differing(evolve(one, run=samples), evolve(two, run=samples)) == []
    three = evolve(two, mesh=(Axis(name="replicate", size=3),))
    (told,) = differing(one, three)
    assert "To train on" not in told, "no number gives as many"
