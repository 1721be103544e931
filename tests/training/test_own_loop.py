"""A loop that steps the optimizer by hand and never calls ``ready.backward`` is told what nobody does for it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import prepkit as pk
from prepkit.findings import RunRefused
from tests.support.gang import Gang

FP16 = {"precision": pk.FP16(), "overrides": ("precision.fp16-unsupported",)}


def prepared(engine: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return pk.apply(
        pk.build_plan(pk.Config(engine=engine, optimizer=pk.optim.AdamW(lr=0.1), **options), nn.Linear(4, 4))
    )


def by_hand(ready: Any, rank: int = 0) -> None:
    ready.model(torch.full((2, 4), rank + 1.0)).sum().backward()
    ready.optimizer.step()
    ready.optimizer.zero_grad()


def heard(act: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    ours = [one for one in caught if "ready.backward" in str(one.message)]
    assert all(one.filename == __file__ for one in ours), "it points at the line that calls"
    return [str(one.message) for one in ours]


@pytest.mark.parametrize(
    ("options", "left_out", "fix"),
    [
        ({"accumulation": 2}, "one step for 2 micro-batches", "write Config(accumulation=1)"),
        ({"clip": pk.ClipNorm(1.0)}, "clipping by ClipNorm(max_norm=1.0", "write Config(clip=None)"),
        (FP16, "the loss scale of float16", "call ready.scaler.scale(loss)"),
    ],
    ids=["accumulation", "clip", "float16"],
)
def test_what_the_plan_asks_of_step_is_named_once_where_nobody_does_it(options: Any, left_out: str, fix: str) -> None:
    ready = prepared(pk.Single(), **options)
    (said,) = heard(lambda: [by_hand(ready) for _ in range(3)])
    assert left_out in said
    assert "Write ready.backward(loss) and ready.step() in the place of loss.backward()" in said
    assert said.endswith(fix) or fix in said
    assert said.count("write Config") == ("write Config" in fix)


def test_a_loop_of_its_own_that_leaves_out_nothing_hears_nothing() -> None:
    plain = prepared(pk.Single())
    assert heard(lambda: [by_hand(plain) for _ in range(3)]) == []
    scaled = prepared(pk.Single(), **FP16)

    def step() -> None:
        scaled.scaler.scale(scaled.model(torch.ones(2, 4)).sum()).backward()
        scaled.scaler.step(scaled.optimizer)
        scaled.scaler.update()

    assert heard(step) == []


def stepped_twice(rank: int, world: int, engine: Any) -> tuple[list[str], list[str]]:
    """What is said of three windows by hand, and of one whose gradients are stepped twice."""
    del world
    ready = prepared(engine)

    def act(times: int) -> None:
        ready.model(torch.full((2, 4), rank + 1.0)).sum().backward()
        for _ in range(times):
            ready.optimizer.step()
        ready.optimizer.zero_grad()

    said: list[list[str]] = []
    for times in (1, 2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                act(times)
        said.append([str(one.message) for one in caught if "run.stepped-again" in str(one.message)])
    return said[0], said[1]


@pytest.mark.parametrize("engine", [pk.DDP(), pk.FSDP1(), pk.FSDP2()], ids=["DDP", "FSDP1", "FSDP2"])
def test_a_loop_of_its_own_that_steps_gradients_twice_is_warned_once(gang2: Gang, engine: Any) -> None:
    (right, wrong), other = gang2.run(stepped_twice, engine, timeout=60)
    assert (right, other) == ([], ([], [])), "rank 0 tells what all do"
    assert ["`AdamW` steps once more over the gradients of its last step" in one for one in wrong] == [True]


def test_nor_does_one_that_reads_the_optimizer_s_state_or_goes_on_behind_close() -> None:
    ready = prepared(pk.Single(), clip=pk.ClipNorm(1.0))
    assert heard(lambda: get_optimizer_state_dict(ready.model, ready.optimizer)) == [], "torch steps with a rate of 0"
    ready.backward(ready.model(torch.ones(2, 4)).sum())
    ready.step()
    ready.close()
    assert heard(lambda: by_hand(ready)) == []


def test_steps_that_nobody_counted_are_told_where_their_number_is_written(tmp_path: Path) -> None:
    ready = prepared(pk.Single())
    seen: list[int] = []
    ready.log.to(lambda: Kept(seen))
    assert heard(lambda: ready.log({"loss": 1.0})) == [], "before any step the number is right"
    by_hand(ready)
    said = heard(lambda: [ready.log({"loss": 1.0}, step=1), ready.log({"loss": 1.0}), ready.log({"loss": 1.0})])
    assert ["ready.log() takes the number of steps from ready.steps" in one for one in said] == [True]
    assert seen == [0, 1, 0, 0]
    saved = prepared(pk.Single())
    by_hand(saved)
    (what,) = heard(lambda: [saved.save(str(tmp_path)) for _ in range(2)])
    assert "ready.save() takes the number of steps" in what


class Kept:
    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def log(self, values: Any, step: int) -> None:
        self.seen.append(step)

    def finish(self) -> None:
        """Nothing is open."""


def unaveraged(rank: int, world: int, engine: Any) -> tuple[str, bool, bool]:
    """What a window of two by hand raises, whether it changed nothing, and whether ranks agree where they average."""
    del world
    ready = prepared(engine, accumulation=2)
    before = [param.detach().clone() for param in ready.model.parameters()]
    try:
        by_hand(ready, rank)
        text = ""
    except RunRefused as error:
        text = str(error)
    same = all(torch.equal(old, new) for old, new in zip(before, ready.model.parameters(), strict=True))
    each = prepared(engine, accumulation=2, average_each=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        by_hand(each, rank)
    return text, same, any("one step for 2 micro-batches" in str(one.message) for one in caught)


@pytest.mark.parametrize("engine", [pk.DDP(), pk.FSDP1(), pk.FSDP2()], ids=lambda engine: type(engine).__name__)
def test_gradients_that_no_backward_by_hand_has_averaged_are_not_stepped(gang2: Gang, engine: Any) -> None:
    for rank, (text, same, warned) in enumerate(gang2.run(unaveraged, engine, timeout=60)):
        assert "no gradient of this rank has been averaged with those of the others" in text
        assert "Config(accumulation=1)" in text
        assert same
        assert warned == (rank == 0), "averaged, and not accumulated; rank 0 says it"
