"""A program that will write shards with ``save_pretrained`` hears of it before it trains, and others hear nothing."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prepkit as pk
from tests.support.gang import Gang


class Saves(nn.Module):
    """As a model of transformers has it: writes what it is given, or what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out

    def save_pretrained(self, folder: str, is_main: bool = True, state_dict: Any = None) -> None:
        """Save nothing: nobody gets here in these tests."""


PROGRAM = """
def train(ready, model, teacher_model, tokenizer, window, folder, check):
    if check:
        ready.checkpoints.check(folder)
    else:
        window(ready)
    if folder is None:
        {}
"""
TOLD = {
    "of what was unwrapped": "ready.unwrap().save_pretrained(folder)",
    "of the face": "accelerator.unwrap_model(model).save_pretrained(folder, is_main_process=True)",
    "of a name to come": "unwrapped_model = ready.unwrap(); unwrapped_model.save_pretrained(folder)",
    "of the model": "model.save_pretrained(folder)",
}
RIGHT = {
    "with its state": "model.save_pretrained(folder, state_dict=accelerator.get_state_dict(model))",
    "with its state in third place": "model.save_pretrained(folder, True, whole)",
    "with options that are not seen": "model.save_pretrained(folder, **options)",
    "of gathered weights": "with deepspeed.zero.GatheredParameters(w): model.save_pretrained(folder)",
    "of a tokenizer": "tokenizer.save_pretrained(folder)",
    "of a tokenizer by another name": "model.tokenizer.save_pretrained(folder)",
    "of another model": "teacher_model.save_pretrained(folder)",
    "by export": "ready.export(folder)",
}
STATE = {
    "in the call": "torch.save(ready.unwrap().state_dict(), folder)",
    "by a name": "state = model.state_dict(); torch.save(state, folder)",
    "in a dict": "torch.save({'step': 3, 'model': ready.model.state_dict()}, folder)",
}
WHOLE_STATE = {
    "gathered": "state = {n: v.full_tensor() for n, v in model.state_dict().items()}; torch.save(state, folder)",
    "by torch": "state = get_model_state_dict(model, options=options); torch.save(state, folder)",
    "of an optimizer": "torch.save(model_optimizer.state_dict(), folder)",
    "of another model": "torch.save(teacher_model.state_dict(), folder)",
    "of a name with another value too": "state = model.state_dict(); state = whole(state); torch.save(state, folder)",
}


def window(ready: Any) -> None:
    ready.backward(ready.model(torch.ones(2, 4)).mean())
    ready.step()


def heard(rank: int, world: int, engine: Any, folder: str, lines: tuple[str, ...], asks: str) -> list[list[str]]:
    del world
    told = []
    for number, line in enumerate(lines):
        program = Path(folder, f"program-{rank}-{number}.py")
        program.write_text(PROGRAM.format(line))
        torch.manual_seed(0)
        model = Saves()
        ready = pk.apply(pk.build_plan(pk.Config(engine=engine, optimizer=pk.optim.SGD(lr=0.1)), model))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runpy.run_path(str(program))["train"](
                ready, model, nn.Linear(1, 1), object(), window, f"{folder}/run-{number}", asks == "check"
            )
        told.append([str(one.message) for one in caught if "saves-shards" in str(one.message)])
        ready.close(keep_group=True)
    return told


@pytest.mark.parametrize("asks", ["step", "check"])
def test_a_program_that_would_write_shards_is_told_before_it_trains(gang2: Gang, tmp_path: Path, asks: str) -> None:
    first, second = gang2.run(heard, pk.FSDP2(), str(tmp_path), tuple(TOLD.values()), asks, timeout=120)
    for number, (one,) in enumerate(first):
        assert one.startswith(f"warning run.saves-shards at model.save_pretrained: program-0-{number}.py:8: ")
        assert "would write this rank's shards" in one
        assert "Write ready.export(folder) on every rank" in one
    assert second == [[]] * len(TOLD)


@pytest.mark.parametrize("asks", ["step", "check"])
def test_a_program_that_would_save_dtensors_by_torch_is_told_too(gang2: Gang, tmp_path: Path, asks: str) -> None:
    lines = (*STATE.values(), *WHOLE_STATE.values())
    first, second = gang2.run(heard, pk.FSDP2(), str(tmp_path), lines, asks, timeout=120)
    for number, (one,) in enumerate(first[: len(STATE)]):
        assert one.startswith(f"warning run.saves-shards at torch.save: program-0-{number}.py:8: torch.save(...)")
        assert "Write ready.export(folder) on every rank" in one
    assert first[len(STATE) :] == [[]] * len(WHOLE_STATE)
    assert second == [[]] * len(lines)
    whole = gang2.run(heard, pk.DDP(), str(tmp_path), tuple(STATE.values()), asks, timeout=120)
    assert whole == [[[]] * len(STATE)] * 2


def test_a_program_that_saves_otherwise_or_shards_nothing_hears_nothing(gang2: Gang, tmp_path: Path) -> None:
    right = gang2.run(heard, pk.FSDP2(), str(tmp_path), tuple(RIGHT.values()), "step", timeout=120)
    assert right == [[[]] * len(RIGHT)] * 2
    whole = gang2.run(heard, pk.DDP(), str(tmp_path), tuple(TOLD.values()), "step", timeout=120)
    assert whole == [[[]] * len(TOLD)] * 2
