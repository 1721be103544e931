"""What is torn, damaged, hostile, or of another run is refused before anything is changed, with what to type."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import time
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from attrs import evolve
from torch import nn

import prepkit as pk
from prepkit.codec import from_data
from prepkit.facts.saved_run import SavedRun
from prepkit.findings import FindingWarning, RunRefused
from prepkit.saving import files, session
from prepkit.saving.failures import CheckpointFailed
from prepkit.saving.folder import LATEST, checkpoints, find
from tests.support.gang import Gang


class Heads(nn.Module):
    """Attention, in which another number of heads changes no shape."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, heads, batch_first=True)
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.attention(x, x, x, need_weights=False)[0])
        return out


def prepared(
    model: nn.Module | None = None, *, split: bool = True, schedule: Any = torch.optim.lr_scheduler.StepLR
) -> Any:
    torch.manual_seed(0)
    model = Heads() if model is None else model
    params = list(model.parameters())
    groups = (
        [{"params": params[:2]}, {"params": params[2:]}] if split else [{"params": params[:3]}, {"params": params[3:]}]
    )
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    scheduler = schedule(optimizer, 3) if schedule else None
    plan = pk.build_plan(pk.Config(scheduler_ticks=1), model, optimizer=optimizer, scheduler=scheduler)
    return pk.apply(plan)


def train(ready: Any, steps: int) -> None:
    for _ in range(steps):
        ready.backward(ready.model(torch.ones(1, 3, 8)).square().mean())
        ready.step()


def trained(folder: Path, *, times: int = 1, keep: int = 1) -> Any:
    ready = prepared()
    for _ in range(times):
        train(ready, 1)
        ready.save(str(folder), keep=keep)
    return ready


def state(ready: Any) -> list[torch.Tensor]:
    inner = [value for one in ready.optimizer.state.values() for value in one.values()]
    return [*(param.detach().clone() for param in ready.model.parameters()), *(value.clone() for value in inner)]


def refused(ready: Any, folder: Path, **how: Any) -> str:
    """The text of the refusal; nothing of the run may have changed."""
    before, rates, draws = state(ready), ready.scheduler and ready.scheduler.state_dict(), torch.get_rng_state()
    with pytest.raises((RunRefused, CheckpointFailed)) as caught:
        ready.resume(str(folder), **how)
    assert all(map(torch.equal, before, state(ready)))
    assert rates == (ready.scheduler and ready.scheduler.state_dict())
    assert torch.equal(draws, torch.get_rng_state())
    return str(caught.value)


@pytest.mark.parametrize(
    ("rule", "build", "says", "lets_through"),
    [
        ("other-config", lambda: prepared(Heads(heads=4)), "attention.num_heads is 2, here 4", True),
        ("other-groups", lambda: prepared(split=False), "2 + 4 parameters, the one here of 3 + 3", False),
        ("other-scheduler", lambda: prepared(schedule=torch.optim.lr_scheduler.ExponentialLR), "StepLR", True),
        ("other-scheduler", lambda: prepared(schedule=None), "saved with StepLR, and here is none", True),
        ("other-dtype", lambda: prepared(Heads().bfloat16()), "in float32, here bfloat16", True),
        (
            "other-model",
            lambda: prepared(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))),
            "it lacks model.0.bias",
            False,
        ),
    ],
)
def test_what_would_train_otherwise_is_refused_with_what_to_type_and_some_of_it_can_be_accepted(
    tmp_path: Path, rule: str, build: Any, says: str, lets_through: bool
) -> None:
    trained(tmp_path)
    ready = build()
    said = refused(ready, tmp_path)
    assert f"error checkpoint.{rule} at " in said
    assert says in said
    if lets_through:
        assert f"accept=['checkpoint.{rule}']" in said
        ready.resume(str(tmp_path), accept=f"checkpoint.{rule}")
        assert ready.steps == 1
        assert ready.attestation.overridden == (f"checkpoint.{rule}",)
    else:
        refused(ready, tmp_path, accept=["checkpoint.other-config"])
        for odd in (3, [3]):
            with pytest.raises(TypeError, match=r"accept=.*: give a text, or a list of texts"):
                ready.resume(str(tmp_path), accept=odd)
        with pytest.warns(FindingWarning, match=r"accepts-unknown .* names no error of a resume that can be"):
            refused(ready, tmp_path, accept=f"checkpoint.{rule}")


def test_parameters_that_were_frozen_when_it_was_saved_are_named_as_such(tmp_path: Path) -> None:
    frozen = Heads()
    frozen.out.requires_grad_(requires_grad=False)
    ready = prepared(frozen)
    train(ready, 1)
    ready.save(str(tmp_path))
    said = refused(prepared(), tmp_path)
    assert "2 + 2 parameters, the one here of 2 + 4; out.bias, out.weight trained by none then, as what is" in said
    assert "ready.resume(folder, only_model=True)" in said
    assert "changed the group" in refused(prepared(split=False), tmp_path)


def test_the_weights_alone_are_read_whatever_trains_them(tmp_path: Path) -> None:
    ready = trained(tmp_path)
    again = prepared(split=False, schedule=None)
    train(again, 2)
    again.resume(str(tmp_path), only_model=True)
    pairs = zip(again.model.parameters(), ready.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert again.steps == 2


def test_a_flipped_bit_is_refused_and_the_one_before_it_named(tmp_path: Path) -> None:
    trained(tmp_path, times=2, keep=2)
    newest, older = checkpoints(str(tmp_path))
    for file in sorted(newest.iterdir()):
        whole = file.read_bytes()
        file.write_bytes(whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:])
        if file.name != "prepkit.json":
            said = refused(prepared(), tmp_path)
            assert f"{file.name}: not the bytes that were written" in said
            assert f"fix: Go on from {older}." in said
        file.write_bytes(whole)
    ready = prepared()
    ready.resume(str(older))
    assert ready.steps == 1


@pytest.mark.parametrize("tear", ["rank-00000.pt", "__0_0.distcp", "prepkit.json", ".metadata", "shared.pt"])
def test_where_the_latest_is_torn_the_newest_whole_one_is_taken_and_said(tmp_path: Path, tear: str) -> None:
    trained(tmp_path, times=2, keep=2)
    newest, older = checkpoints(str(tmp_path))
    (newest / tear).unlink()
    ready = prepared()
    with pytest.warns(FindingWarning) as heard:
        ready.resume(str(tmp_path))
    assert ready.steps == 1
    (told,) = map(str, (one.message for one in heard))
    assert told.startswith(f"warning resume.latest-torn at {older}: {newest / tear}: it is not there")
    assert "this is the newest that is whole" in told


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("name", [".metadata", "shared.pt", "rank-00000.pt"])
def test_nothing_that_a_checkpoint_holds_is_run(tmp_path: Path, name: str) -> None:
    """The digests are made anew, as whoever plants such a file would."""
    trained(tmp_path / "run")
    source = find(str(tmp_path / "run"))[0][0]
    bomb = Bomb(tmp_path / "was run")
    if name == ".metadata":
        (source / name).write_bytes(pickle.dumps(bomb))
    else:
        torch.save({"plain": bomb}, source / name)
    resealed(source, name)
    said = refused(prepared(), tmp_path / "run")
    assert "nothing was run" in said or "was not read" in said
    assert not (tmp_path / "was run").exists()


def resealed(source: Path, name: str) -> None:
    """Makes the digests of one file anew."""
    path = source / "prepkit.json"
    saved = from_data(json.loads(path.read_text())["checkpoint"], SavedRun)
    (new,) = files.digests(source, [name])
    path.unlink()
    files.write_manifest(source, evolve(saved, files=tuple(new if file.name == name else file for file in saved.files)))


@pytest.mark.parametrize("elsewhere", ["../outside.distcp", "/etc/passwd", "a/b", ""])
def test_no_file_outside_of_the_checkpoint_is_read(tmp_path: Path, elsewhere: str) -> None:
    trained(tmp_path / "run")
    source = find(str(tmp_path / "run"))[0][0]
    metadata: Any = pickle.loads((source / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = elsewhere
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    resealed(source, ".metadata")
    assert "which would be outside of it" in refused(prepared(), tmp_path / "run")


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    source = find(str(tmp_path / "run"))[0][0]
    (source / "shared.pt").rename(tmp_path / "shared.pt")
    (source / "shared.pt").symlink_to(tmp_path / "shared.pt")
    assert "no plain file" in refused(prepared(), tmp_path / "run")


def test_a_scheduler_that_could_not_be_read_again_is_said_before_training(tmp_path: Path) -> None:
    ready = prepared()
    ready.scheduler.own = Bomb(tmp_path / "never")
    with pytest.raises(CheckpointFailed, match=r"not-plain at the state of the scheduler: it is no plain"):
        ready.checkpoints.check(str(tmp_path / "run"))
    (tmp_path / "file").touch()
    del ready.scheduler.own
    with pytest.raises(CheckpointFailed, match=r"checkpoint\.not-written at .*(Not a directory|File exists)"):
        ready.checkpoints.check(str(tmp_path / "file"))
    ready.checkpoints.check(str(tmp_path / "new" / "folder"))
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_the_last_n_are_kept_and_one_of_them_can_be_chosen(tmp_path: Path) -> None:
    trained(tmp_path, times=4, keep=3)
    found = checkpoints(str(tmp_path))
    assert [path.name.rpartition("-")[0] for path in found] == ["000004-step-4", "000003-step-3", "000002-step-2"]
    assert (tmp_path / LATEST).read_text().strip() == found[0].name
    ready = prepared()
    ready.resume(str(found[2]))
    assert ready.steps == 2


def test_every_random_state_goes_on(tmp_path: Path) -> None:
    ready = prepared()
    ready.save(str(tmp_path))
    drawn = [(random.random(), float(numpy.random.rand()), float(torch.rand(()))) for _ in range(2)]
    ready.resume(str(tmp_path))
    assert [(random.random(), float(numpy.random.rand()), float(torch.rand(()))) for _ in range(2)] == drawn


class Positioned(torch.utils.data.DataLoader[Any]):
    """A loader that knows where it stands."""

    at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_counters_and_positions_of_loaders_go_on(tmp_path: Path) -> None:
    ready, again = prepared(), prepared()
    for one in (ready, again):
        one.loaders = (Positioned([1, 2]),)
    ready.loaders[0].at = 17
    ready.loop.passes.set_epoch(3)
    train(ready, 2)
    ready.save(str(tmp_path))
    again.resume(str(tmp_path))
    assert (again.loaders[0].at, again.epoch, again.steps) == (17, 3, 2)


def test_what_fails_in_the_background_is_raised_by_the_next_call_and_the_last_good_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = trained(tmp_path)
    good = find(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(files, "_sha256", lambda _: (_ for _ in ()).throw(OSError("disk is gone")))
        ready.save(str(tmp_path), wait=False)
        with pytest.raises(CheckpointFailed, match="disk is gone"):
            ready.checkpoints.finish()
    assert find(str(tmp_path)) == good
    assert not list(tmp_path.glob("*.partial"))
    before = state(ready)
    ready.save(str(tmp_path), wait=False)
    train(ready, 2)  # what is written is what stood there when save was called
    ready.close()
    again = prepared()
    again.resume(str(tmp_path))
    assert all(map(torch.equal, before, state(again)))


def test_a_checkpoint_that_is_being_written_is_whole_when_an_error_has_ended_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = files.digests
    monkeypatch.setattr(files, "digests", lambda *given: time.sleep(1.0) or digests(*given))

    def fails() -> None:
        ready = prepared()
        try:
            train(ready, 1)
            ready.save(str(tmp_path), wait=False)
            raise ValueError("the run's own error")
        finally:
            ready.close()

    with pytest.raises(ValueError, match="the run's own error"):
        fails()
    assert len(checkpoints(str(tmp_path))) == 1


def test_a_resume_reads_only_once_everything_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path)
    monkeypatch.setattr(session, "fill", lambda *_a, **_k: pytest.fail("nothing is read before it fits"))
    refused(prepared(split=False), tmp_path)


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        (None, "None is no path of a folder"),
        (7, "7 is no path of a folder"),
        (b"runs", "b'runs' is no path of a folder"),
        ("", "'' names no folder"),
        (" ", "' ' names no folder"),
        ("a\0b", r"'a\x00b' holds a null character, which no path does"),
    ],
)
def test_what_is_no_folder_is_refused_with_what_to_type_and_not_taken_for_a_new_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Any, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ready = prepared()
    for call in (
        lambda: ready.resume(folder),
        lambda: ready.resume(folder, missing_ok=True),
        lambda: ready.save(folder),
        lambda: ready.checkpoints.check(folder),
    ):
        with pytest.raises(RunRefused) as caught:
            call()
        fix = 'Give every rank the same folder, such as "runs/7".'
        assert str(caught.value) == f"error checkpoint.no-folder at folder: {said}\n  fix: {fix}"
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_begins_anew_says_so_and_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ready = prepared()
    (tmp_path / "empty").mkdir()
    for name, why in (("run", "there is no such folder"), ("empty", "it holds no finished checkpoint")):
        with pytest.warns(FindingWarning) as heard:
            assert not ready.resume(name, missing_ok=True)
        (told,) = map(str, (one.message for one in heard))
        anew = f"{tmp_path / name}: {why}, so that training begins at step 0"
        assert told.startswith(f"warning resume.nothing-saved at {anew}")
    assert not (tmp_path / "run").exists()


def folders_that_differ(rank: int, world: int, root: str) -> list[str]:
    """What each rank hears where they name different folders, or one of them none."""
    del world
    cfg = pk.Config(engine=pk.DDP(), optimizer=pk.optim.AdamW())
    ready = pk.apply(pk.build_plan(cfg, nn.Linear(2, 2)))
    told: list[str] = []
    for other in (f"{root}/b", None):
        folder: Any = other if rank else f"{root}/a"
        for call in (partial(ready.resume, missing_ok=True), ready.save, ready.checkpoints.check):
            with pytest.raises(RunRefused) as caught:
                call(folder)
            told.append(str(caught.value))
    assert not ready.resume(f"{root}/a", missing_ok=True)
    ready.save(f"{root}/a")
    assert ready.resume(f"{root}/a", missing_ok=True)
    ready.close()
    return told


def test_folders_that_differ_over_ranks_are_refused_on_every_rank_before_anything_is_made(
    gang2: Gang, tmp_path: Path
) -> None:
    told, other = gang2.run_fresh(folders_that_differ, str(tmp_path))
    assert told == other
    fix = 'Give every rank the same folder, such as "runs/7".'
    paths = f"rank 0 gives '{tmp_path}/a', and rank 1 '{tmp_path}/b'"
    assert told[:3] == [f"error checkpoint.folders-differ at folder: {paths}\n  fix: {fix}"] * 3
    assert told[3:] == [f"error checkpoint.no-folder at folder: None is no path of a folder (rank 1)\n  fix: {fix}"] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


class ByAttribute(pickle.Pickler):
    """Names members of enums by ``getattr``, as the first Pythons 3.11 do."""

    def __init__(self, file: io.BytesIO, owner: Any) -> None:
        super().__init__(file)
        self.owner = owner

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (self.owner or type(value), value.name)) if isinstance(value, Enum) else NotImplemented


@pytest.mark.parametrize("owner", [None, torch.Size], ids=["its own", "another"])
def test_a_member_of_torch_s_enum_is_read_as_every_python_names_it_and_nothing_else(tmp_path: Path, owner: Any) -> None:
    trained(tmp_path / "run")
    source = find(str(tmp_path / "run"))[0][0]
    ByAttribute(packed := io.BytesIO(), owner).dump(files.read_metadata(source))
    assert b"getattr" in packed.getvalue()
    (source / ".metadata").write_bytes(packed.getvalue())
    resealed(source, ".metadata")
    if owner is None:
        (ready := prepared()).resume(str(tmp_path / "run"))
        assert ready.steps
    else:
        said = refused(prepared(), tmp_path / "run")
        assert "names an attribute of <class 'torch.Size'>" in said
        assert "nothing was run" in said
