"""A checkpoint is whole or not there, holds what was trained and nothing else, and looking at state changes none."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import prepkit as pk
from prepkit.findings import FindingWarning, RunRefused
from prepkit.saving import writing
from prepkit.saving.failures import CheckpointFailed
from prepkit.saving.folder import LATEST, PARTIAL, find
from tests.support.gang import Gang, GangError


class Partly(nn.Module):
    """Two blocks, of which one has no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.blocks[0](x))


ENGINES = {
    "Single": pk.Single(),
    "DDP": pk.DDP(find_unused_parameters=True),
    "FSDP1": pk.FSDP1(wrap=pk.wrap.WrapRoot()),
    "FSDP2": pk.FSDP2(wrap=pk.wrap.WrapRoot()),
}


def prepared(engine: str = "Single", seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    model = Partly()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    cfg = pk.Config(engine=ENGINES[engine], **options)
    return pk.apply(pk.build_plan(cfg, model, optimizer=optimizer))


def train(ready: Any, count: int) -> float:
    loss = torch.zeros(())
    for index in range(count):
        batch = torch.arange(12.0).reshape(3, 4).sin() + index
        loss = (ready.model(batch) - 1).square().mean()
        ready.backward(loss)
        ready.step()
    return float(loss.detach())


def steps_counted(ready: Any) -> list[float]:
    return [float(state["step"]) for state in ready.optimizer.state.values() if "step" in state]


def saved_partly(rank: int, world: int, folder: str, engine: str) -> float:
    del rank, world
    ready = prepared(engine)
    train(ready, 3)
    ready.save(folder)
    return train(ready, 2)


def resumed_partly(rank: int, world: int, folder: str, engine: str) -> tuple[float, list[float]]:
    del rank, world
    ready = prepared(engine, seed=1)
    ready.resume(folder)
    counted = steps_counted(ready)
    return train(ready, 2), counted


@pytest.mark.parametrize("engine", ["DDP", "FSDP1", "FSDP2"])
def test_a_parameter_that_never_had_a_gradient_does_not_stop_a_run_from_going_on(
    gang2: Gang, tmp_path: Path, engine: str
) -> None:
    losses = gang2.run(saved_partly, str(tmp_path / "run"), engine, timeout=60)
    for loss, (found, counted) in zip(
        losses, gang2.run(resumed_partly, str(tmp_path / "run"), engine, timeout=60), strict=True
    ):
        assert found == pytest.approx(loss, rel=1e-6)
        assert set(counted) <= {0.0, 3.0}  # 0: FSDP1 keeps one state for the whole flat parameter


def test_what_had_no_state_when_it_was_saved_has_none_afterwards(tmp_path: Path) -> None:
    ready = prepared()
    train(ready, 3)
    ready.save(str(tmp_path))
    again = prepared(seed=1)
    again.resume(str(tmp_path))
    assert len(again.optimizer.state) == 4
    assert steps_counted(again) == [3.0] * 4


def test_saving_before_the_first_step_changes_nothing(tmp_path: Path) -> None:
    ready, undisturbed = prepared(), prepared()
    ready.save(str(tmp_path))
    assert not ready.optimizer.state
    assert all(param.grad is None for param in ready.model.parameters())
    assert train(ready, 4) == train(undisturbed, 4)
    again = prepared(seed=1)
    again.resume(str(tmp_path))
    assert not again.optimizer.state
    assert train(again, 4) == train(prepared(), 4)


def test_gradients_that_are_there_do_not_keep_the_optimizer_s_state_out(tmp_path: Path) -> None:
    ready = prepared()
    train(ready, 3)
    ready.save(str(tmp_path))
    again = prepared(seed=1)
    before = [torch.ones_like(param) for param in again.model.parameters()]
    for param, grad in zip(again.model.parameters(), before, strict=True):
        param.grad = grad
    again.resume(str(tmp_path))
    assert steps_counted(again) == [3.0] * 4
    assert all(param.grad is grad for param, grad in zip(again.model.parameters(), before, strict=True))


def test_inside_a_window_nothing_is_saved(tmp_path: Path) -> None:
    ready = prepared(accumulation=2)
    train(ready, 1)
    with pytest.raises(RuntimeError, match=r"1 of 2 micro-batches of this window have run, and a checkpoint holds no"):
        ready.save(str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_inside_a_window_nothing_is_resumed(tmp_path: Path) -> None:
    prepared().save(str(tmp_path))
    ready = prepared(accumulation=2)
    train(ready, 1)
    with pytest.raises(RuntimeError, match=r"loop\.unfinished-window at ready\.resume\(\)"):
        ready.resume(str(tmp_path))


class Deeper(Partly):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(4, 4)


def test_names_are_compared_both_ways_and_a_refused_resume_leaves_everything_as_it_was(tmp_path: Path) -> None:
    ready = prepared()
    train(ready, 1)
    ready.save(str(tmp_path / "small"))
    deeper = pk.apply(pk.build_plan(pk.Config(optimizer=pk.optim.AdamW()), Deeper()))
    train(deeper, 2)
    deeper.save(str(tmp_path / "deep"))
    before = {name: value.clone() for name, value in deeper.model.state_dict().items()}
    with pytest.raises(RunRefused, match=r"it lacks model\.more\.bias, model\.more\.weight\n"):
        deeper.resume(str(tmp_path / "small"))
    assert all(torch.equal(value, before[name]) for name, value in deeper.model.state_dict().items())
    assert steps_counted(deeper) == [2.0] * 4
    with pytest.raises(RunRefused, match=r"it holds model\.more\.bias, .* which nothing here has"):
        ready.resume(str(tmp_path / "deep"))
    assert steps_counted(ready) == [1.0] * 4


def test_a_checkpoint_of_training_is_loaded_for_inference_without_its_optimizer(tmp_path: Path) -> None:
    ready = prepared()
    train(ready, 1)
    ready.save(str(tmp_path))
    model = Partly()
    pk.apply(pk.build_plan(pk.Config(intent=pk.Intent.INFERENCE), model)).resume(str(tmp_path))
    assert torch.equal(model.blocks[0].weight, ready.model.blocks[0].weight)


def killed_while_saving(rank: int, world: int, folder: str) -> None:
    del world
    ready = prepared("FSDP2")
    train(ready, 1)
    ready.save(folder)
    train(ready, 1)
    real = writing.write

    def torn(*args: Any, **options: Any) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        real(*args, **options)

    writing.write = torn
    ready.save(folder)


def steps_resumed(rank: int, world: int, folder: str) -> list[float]:
    del rank, world
    ready = prepared("FSDP2", seed=1)
    ready.resume(folder)
    return steps_counted(ready)


def test_a_rank_that_is_killed_while_it_saves_leaves_the_last_good_checkpoint(gang2: Gang, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    with pytest.raises(GangError, match="died with exit code -9"):
        gang2.run(killed_while_saving, folder, timeout=30)
    assert gang2.run(steps_resumed, folder, timeout=60) == [[1.0] * 4] * 2


def test_what_fails_while_it_is_written_leaves_the_last_good_checkpoint_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = prepared()
    train(ready, 1)
    ready.save(str(tmp_path))
    good = find(str(tmp_path))[0][0]
    monkeypatch.setattr(torch, "save", lambda *_args, **_options: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(CheckpointFailed, match="disk full"):
        ready.save(str(tmp_path))
    assert find(str(tmp_path))[0][0] == good
    assert not list(tmp_path.glob(f"*{PARTIAL}"))


def test_saving_again_shows_no_warning_twice(tmp_path: Path) -> None:
    model = Partly()
    optimizer = torch.optim.AdamW(model.parameters())
    ready = pk.apply(pk.build_plan(pk.Config(), model, optimizer=optimizer))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("default")  # once for each place, as Python has it
        for _ in range(3):
            ready.save(str(tmp_path))
            warnings.warn("said in every step", stacklevel=1)
    assert [str(one.message) for one in heard] == ["said in every step"]


@pytest.mark.parametrize("wait", [True, False])
def test_saving_and_resuming_change_no_warning_filter_and_warn_of_nothing(tmp_path: Path, wait: bool) -> None:
    ready, before = prepared(), list(warnings.filters)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        inside = list(warnings.filters)
        ready.save(str(tmp_path), wait=wait)
        ready.checkpoints.finish()
        prepared().resume(str(tmp_path))
        assert warnings.filters == inside
    assert [str(one.message) for one in heard] == []
    assert warnings.filters == before


def test_the_next_checkpoint_takes_the_place_of_the_last(tmp_path: Path) -> None:
    ready = prepared()
    for _ in range(3):
        train(ready, 1)
        ready.save(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted((LATEST, find(str(tmp_path))[0][0].name))
    again = prepared(seed=1)
    again.resume(str(tmp_path))
    assert steps_counted(again) == [3.0] * 4


@pytest.mark.parametrize(
    ("name", "why"),
    [("../elsewhere", "which is no subfolder"), ("gone", "is not there"), ("", "is no subfolder")],
)
def test_a_pointer_that_leads_nowhere_is_refused(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / LATEST).write_text(name)
    with pytest.raises(CheckpointFailed, match=why):
        prepared().resume(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"../elsewhere", b"gone", b"\xff\xfe"])
def test_a_pointer_that_leads_nowhere_is_passed_over_where_whole_checkpoints_are(
    tmp_path: Path, content: bytes
) -> None:
    ready = prepared()
    for _ in range(2):
        train(ready, 1)
        ready.save(str(tmp_path), keep=2)
    (tmp_path / LATEST).write_bytes(content)
    again = prepared(seed=1)
    with pytest.warns(FindingWarning, match=r"resume\.latest-torn") as heard:
        again.resume(str(tmp_path))
    assert again.steps == 2
    (told,) = heard
    assert (f"{tmp_path / 'gone'}/" if content == b"gone" else f"{tmp_path / LATEST}: it ") in str(told.message)


def test_torch_s_own_checkpoint_in_the_folder_itself_is_read(tmp_path: Path) -> None:
    ready = prepared()
    train(ready, 2)
    ready.save(str(tmp_path))
    again = prepared(seed=1)
    again.resume(str(find(str(tmp_path))[0][0]))
    assert steps_counted(again) == [2.0] * 4
