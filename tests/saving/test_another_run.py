"""A folder in which another run has saved, and a run that goes on otherwise than it was saved, are reported."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import prepkit as pk
from prepkit.findings import FindingWarning


def prepared(**options: Any) -> Any:
    torch.manual_seed(0)
    return pk.apply(pk.build_plan(pk.Config(optimizer=pk.optim.SGD(lr=0.1), **options), nn.Linear(4, 4)))


def step(ready: Any, times: int = 1) -> None:
    for _ in range(times):
        ready.backward(ready.model(torch.ones(2, 4)).sum())
        ready.step()


def heard(act: Any) -> list[str]:
    """What is reported while ``act`` runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(one.message) for one in caught if one.category is FindingWarning]


def names(folder: Path) -> list[str]:
    return sorted(path.name.rpartition("-")[0] for path in folder.iterdir() if path.is_dir())


@pytest.mark.parametrize("wait", [True, False])
def test_checkpoints_of_a_run_that_was_not_resumed_are_left_alone_and_reported_once(tmp_path: Path, wait: bool) -> None:
    def saved(ready: Any, times: int, steps: int, keep: int) -> None:
        for _ in range(times):
            step(ready, steps)
            ready.save(str(tmp_path), keep=keep, wait=wait)
        ready.checkpoints.finish()

    old, new, again = prepared(), prepared(), prepared()
    assert heard(lambda: saved(old, 3, 3, 3)) == []
    (told,) = heard(lambda: saved(new, 3, 1, 2))
    assert told.startswith(f"warning save.beside-another-run at {tmp_path}: it holds 3 checkpoints of a run that this")
    assert "000003-step-9" in told
    assert names(tmp_path) == ["000001-step-3", "000002-step-6", "000003-step-9", "000005-step-2", "000006-step-3"]
    assert again.resume(str(tmp_path))
    assert heard(lambda: saved(again, 1, 1, 1)) == []
    assert names(tmp_path) == ["000007-step-4"], "all that was there when it was resumed is its own"


def test_a_run_with_another_number_of_steps_hears_which_schedule_counts(tmp_path: Path) -> None:
    first = prepared(total_steps=10)
    step(first, 2)
    first.save(str(tmp_path))
    assert heard(lambda: prepared(total_steps=10).resume(str(tmp_path))) == []
    (told,) = heard(lambda: prepared(total_steps=20).resume(str(tmp_path)))
    assert "the run takes 20 steps in all, and took 10: a schedule that ends with them is another" in told
    assert told.endswith("write Config(total_steps=10).")


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_pass_that_goes_on_over_other_data_hears_so_and_one_that_begins_does_not(
    tmp_path: Path, shuffle: bool
) -> None:
    def over(length: int, **options: Any) -> Any:
        loader = DataLoader(torch.ones(length, 4), batch_size=2, shuffle=shuffle, **options)  # type: ignore[arg-type]
        return pk.apply(pk.build_plan(pk.Config(optimizer=pk.optim.SGD()), nn.Linear(4, 4), loaders=[loader]))

    first = over(8)
    for number, batch in enumerate(first.loaders[0]):
        first.backward(first.model(batch).sum())
        first.step()
        first.save(str(tmp_path / ("end" if number == 3 else "inside")))
    assert heard(lambda: over(8).resume(str(tmp_path / "inside"))) == []
    assert heard(lambda: over(12).resume(str(tmp_path / "end"))) == []
    (told,) = heard(lambda: over(12).resume(str(tmp_path / "inside")))
    assert told.startswith("warning resume.other-data at loaders: loaders[0] has 12, and had 8 samples when the pass")


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
