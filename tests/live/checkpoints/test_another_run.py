"""A folder in which another run has saved, and a run that goes on otherwise than it was saved, are told of."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import prepkit as pk


def prepared(**options: Any) -> Any:
    torch.manual_seed(0)
    return pk.apply(pk.build_plan(pk.Config(optimizer=pk.SGD(lr=0.1), **options), nn.Linear(4, 4)))


def step(ready: Any, times: int = 1) -> None:
    for _ in range(times):
        ready.backward(ready.model(torch.ones(2, 4)).sum())
        ready.step()


def heard(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    found = [one.getMessage() for one in caplog.records if part in one.getMessage()]
    caplog.clear()
    return found


def names(folder: Path) -> list[str]:
    return sorted(path.name.rpartition("-")[0] for path in folder.iterdir() if path.is_dir())


@pytest.mark.parametrize("wait", [True, False])
def test_checkpoints_of_a_run_that_was_not_resumed_are_left_alone_and_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wait: bool
) -> None:
    caplog.set_level(logging.WARNING, "prepkit")
    old = prepared()
    for _ in range(3):
        step(old, 3)
        old.save(str(tmp_path), keep=3, wait=wait)
    old.finish_saving()
    assert heard(caplog, "did not resume") == []
    new = prepared()
    for _ in range(3):
        step(new)
        new.save(str(tmp_path), keep=2, wait=wait)
    new.finish_saving()
    (told,) = heard(caplog, "did not resume")
    assert "holds 3 checkpoints of a run that this one did not resume, 000003-step-9" in told
    assert names(tmp_path) == ["000001-step-3", "000002-step-6", "000003-step-9", "000005-step-2", "000006-step-3"]
    again = prepared()
    assert again.resume(str(tmp_path))
    step(again)
    again.save(str(tmp_path), wait=wait)
    again.finish_saving()
    assert heard(caplog, "did not resume") == []
    assert names(tmp_path) == ["000007-step-4"], "all that lay where it was resumed is its own"


def test_a_run_with_another_number_of_steps_is_told_which_schedule_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "prepkit")
    first = prepared(total_steps=10)
    step(first, 2)
    first.save(str(tmp_path))
    prepared(total_steps=10).resume(str(tmp_path))
    assert heard(caplog, "steps in all") == []
    prepared(total_steps=20).resume(str(tmp_path))
    (told,) = heard(caplog, "steps in all")
    assert "it takes 20 steps in all, and took 10: a schedule that ends with them is another" in told
    assert told.endswith("write Config(total_steps=10)")


@pytest.mark.parametrize(
    ("made", "told"),
    [((), "there is no such folder"), (("random_states_0.pkl",), "one of accelerate's save_state")],
)
def test_a_folder_without_a_checkpoint_says_what_it_is(tmp_path: Path, made: tuple[str, ...], told: str) -> None:
    folder = tmp_path / "run"
    for name in made:
        folder.mkdir()
        (folder / name).touch()
    with pytest.raises(RuntimeError, match=told):
        prepared().resume(str(folder))
