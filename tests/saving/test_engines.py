"""Saved on one mesh, resumed on another, and exported for everybody else."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import prepkit as pk
from prepkit.saving.failures import CheckpointFailed
from tests.support.gang import Gang
from tests.support.transformers_models import build

WAYS = {
    "shards": {"engine": pk.FSDP2(), "checkpointing": pk.CheckpointBlocks()},
    "copies of shards": {"engine": pk.FSDP2(), "mesh": pk.Mesh(replicate=2, shard=2)},
    "flat": {"engine": pk.FSDP1()},
    "whole": {"engine": pk.DDP()},
}


def prepared(way: str, family: str = "llama-tied", seed: int = 0) -> tuple[Any, Any]:
    """A model that does not have the values that are saved, unless the seed is that of the model that was."""
    model, batch = build(family)
    if seed:
        with torch.no_grad():
            for param in model.parameters():
                param.add_(float(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    cfg = pk.Config(scheduler_ticks=1, **WAYS[way])
    plan = pk.build_plan(cfg, model, optimizer=optimizer, scheduler=scheduler)
    return pk.apply(plan), batch


def steps(ready: Any, batch: Any, count: int) -> float:
    """The loss of the last step. Every rank has the whole batch, so that the number of ranks does not matter."""
    loss = torch.zeros(())
    for _ in range(count):
        loss = ready.model(**batch).loss
        ready.backward(loss)
        ready.step()
    return float(loss.detach())


def trained_and_saved(rank: int, world: int, folder: str, way: str) -> tuple[float, float]:
    """Two steps, saved; then the loss of the third, and the learning rate after it."""
    del rank, world
    ready, batch = prepared(way)
    steps(ready, batch, 2)
    ready.save(folder)
    return steps(ready, batch, 1), ready.scheduler.get_last_lr()[0]


def resumed(rank: int, world: int, folder: str, way: str) -> tuple[float, float]:
    del rank, world
    ready, batch = prepared(way, seed=1)
    ready.resume(folder)
    return steps(ready, batch, 1), ready.scheduler.get_last_lr()[0]


def test_what_two_ranks_saved_goes_on_on_other_meshes_and_engines(gang2: Gang, gang4: Gang, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    (loss, rate), again = gang2.run(trained_and_saved, folder, "shards", timeout=90)
    assert (loss, rate) == again
    others = [
        *gang4.run(resumed, folder, "copies of shards", timeout=90),
        *gang2.run(resumed, folder, "whole", timeout=60),
        *gang2.run(resumed, folder, "flat", timeout=60),
        *gang2.run(resumed, folder, "shards", timeout=60),
    ]
    for found in others:
        assert found == (pytest.approx(loss, rel=1e-5), rate)


def refused(rank: int, world: int, folder: str) -> str:
    del rank, world
    ready, _ = prepared("shards")
    try:
        ready.resume(folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_folder_that_is_no_checkpoint_is_an_error_on_every_rank(gang2: Gang, tmp_path: Path) -> None:
    for said in gang2.run(refused, str(tmp_path / "nowhere"), timeout=60):
        assert said.startswith("CheckpointFailed: ")
        assert "error checkpoint.not-there at " in said
        assert "nowhere: there is no such folder" in said


def exported(rank: int, world: int, folder: str, way: str) -> float:
    del rank, world
    ready, batch = prepared(way)
    steps(ready, batch, 1)
    ready.export(folder)
    return float(ready.model(**batch).loss.detach())


@pytest.mark.parametrize("way", ["shards", "flat"])
def test_an_export_is_what_from_pretrained_loads(gang2: Gang, tmp_path: Path, way: str) -> None:
    """torch's own whole state dict of flat parameters ends rank 0 on a CPU (2.13)."""
    from transformers import AutoModelForCausalLM

    losses = gang2.run(exported, str(tmp_path), way, timeout=90)
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path))
    _, batch = build("llama-tied")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert [float(model(**batch).loss.detach())] * 2 == pytest.approx(losses, rel=1e-6)
    stored = {key for file in tmp_path.glob("*.safetensors") for key in load_file(str(file))}
    assert "lm_head.weight" not in stored


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.right.weight = self.left.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(self.left(x))


def exported_into(rank: int, world: int, folder: str) -> str:
    """What each rank hears of a folder that rank 0 cannot make."""
    del rank, world
    ready, _ = prepared("shards")
    with pytest.raises(CheckpointFailed) as caught:
        ready.export(f"{folder}/file/exported")
    return str(caught.value)


def test_an_export_that_cannot_be_written_is_refused_on_every_rank_with_what_to_type(
    gang2: Gang, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    first, second = gang2.run(exported_into, str(tmp_path), timeout=60)
    assert first == second
    assert f"error export.not-written at {tmp_path}/file/exported: NotADirectoryError: " in first
    assert "fix: Mend what the error names, or give another folder" in first


def test_a_plain_model_alone_is_exported_and_loaded_again(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    model = Shared()
    ready = pk.apply(pk.build_plan(pk.Config(intent=pk.Intent.INFERENCE), model))
    ready.export(str(tmp_path))
    assert list(load_file(str(tmp_path / "model.safetensors"))) == ["left.weight"]
    with torch.device("meta"):
        other = Shared()
    cfg = pk.Config(intent=pk.Intent.INFERENCE, weights=pk.LoadWeights(str(tmp_path)))
    found = pk.apply(pk.build_plan(cfg, other)).model
    assert found.right.weight is found.left.weight
    assert torch.equal(found.left.weight, model.left.weight)


class Remembers(nn.Module):
    """A running mean of what it computes, which its next outputs depend on: of other samples it is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))  # torch's planner would take the second from rank 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        self.mean.lerp_(out.detach().mean(0), 0.5)
        self.count += 1
        return out - self.mean.clone()


def remembered(rank: int, world: int, folder: str, way: str, mended: str) -> tuple[list[str], list[float], list[float]]:
    """What two saves say of buffers, and two losses after them: of the run that goes on, and of one that resumes."""
    del world

    def begun() -> Any:
        torch.manual_seed(0)
        cfg = pk.Config(optimizer=pk.optim.SGD(lr=0.1), timeout_s=60.0, engine=WAYS[way]["engine"])
        return pk.apply(pk.build_plan(cfg, Remembers()))

    def losses(ready: Any, count: int) -> list[float]:
        found = []
        for at in range(count):
            loss = ready.model(torch.full((2, 4), 1.0 + rank + at)).square().mean()
            ready.backward(loss)
            ready.step()
            found.append(float(loss.detach()))
        return found

    ready = begun()
    losses(ready, 3)
    if mended:
        for buffer in ready.unwrap().buffers():
            dist.broadcast(buffer, src=0)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        ready.save(folder)
        ready.export(f"{folder}-export")
    said = [str(one.message) for one in heard if "buffers-apart" in str(one.message)]
    went_on = losses(ready, 2)
    ready.close(keep_group=True)
    ready = begun()
    assert ready.resume(folder)
    again = losses(ready, 2)
    ready.close(keep_group=True)
    return said, went_on, again


@pytest.mark.parametrize("way", ["shards", "flat"])
def test_buffers_that_ranks_hold_unlike_are_told_once_at_a_save(gang2: Gang, tmp_path: Path, way: str) -> None:
    (told, first, resumed_first), (silent, second, resumed_second) = gang2.run(
        remembered, str(tmp_path / "run"), way, "", timeout=120
    )
    (text,) = told
    assert "run.buffers-apart at model: Ranks hold other values of 1 buffer: `mean`. Rank 0's are saved" in text
    assert silent == []
    assert resumed_first[0] == first[0], "rank 0's are saved"
    assert resumed_second[0] != second[0]
    same = gang2.run(remembered, str(tmp_path / "mended"), way, "mended", timeout=120)
    assert all(said == [] and went_on == again for said, went_on, again in same), "with what the fix says to type"


def test_ddp_saves_the_buffers_that_it_sends_to_all_before_the_next_forward(gang2: Gang, tmp_path: Path) -> None:
    for said, went_on, again in gang2.run(remembered, str(tmp_path / "run"), "whole", "", timeout=120):
        assert said == []
        assert went_on == again, "to the bit"
