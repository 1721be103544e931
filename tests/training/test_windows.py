"""Where windows end when a batch of a loader makes several micro-batches, fewer of them, or none."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import prepkit as pk
from prepkit.findings import FindingWarning
from tests.support.deepspeed_cpu import lean
from tests.support.gang import Gang

SAMPLES = torch.arange(48.0).reshape(24, 2) / 48


def prepared(engine: Any, accumulation: int, samples: int = 24, batch: int = 4) -> Any:
    torch.manual_seed(0)
    loader = DataLoader(SAMPLES[:samples], batch_size=batch)  # type: ignore[arg-type]
    cfg = pk.Config(engine=engine, optimizer=pk.optim.SGD(lr=0.1), accumulation=accumulation)
    return pk.apply(pk.build_plan(cfg, nn.Linear(2, 2), loaders=[loader]))


def trained(ready: Any, parts: Iterator[int]) -> tuple[str, list[str]]:
    """``|`` for each micro-batch that ends a window, ``.`` for each other one; and what was warned of."""
    ends = ""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for batch in ready.loaders[0]:
            many = next(parts)
            for part in batch.chunk(many) if many else ():
                ready.backward(ready.model(part).square().mean())
                ends += ".|"[ready.step()]
    assert all(one.filename == __file__ for one in heard if "pass" in str(one.message))
    return ends, [str(one.message) for one in heard if "window" in str(one.message)]


@pytest.mark.parametrize(
    ("accumulation", "parts", "ends", "warned"),
    [
        (2, (1, 1, 1, 1, 1, 1), ".|.|.|", ""),
        (4, (1, 1, 1, 1, 1, 1), "...|.|", ""),
        (4, (4, 4, 4, 4, 4, 4), "...|" * 6, ""),
        (2, (4, 4, 4, 4, 4, 4), ".|" * 12, ""),
        (8, (4, 4, 4, 4, 4, 4), ".......|" * 3, ""),
        (8, (2, 2, 2, 2, 2, 2), ".......|...|", ""),
        (4, (4, 4, 0, 4, 2, 4), "...|...|...|..", ""),
        (4, (1, 1, 1, 1, 1, 2), "...|.||", "the last batch of a pass makes more than 1 micro-batch,"),
        (4, (2, 2, 2, 2, 2, 4), "...|...|...|||", "the last batch of a pass makes more than 2 micro-batches,"),
    ],
    ids=str,
)
def test_a_window_ends_with_the_last_micro_batch_of_the_last_batch(
    accumulation: int, parts: tuple[int, ...], ends: str, warned: str
) -> None:
    found, said = trained(prepared(pk.Single(), accumulation), iter(parts))
    if parts == (4, 4, 0, 4, 2, 4):
        ends += ".|.|"
    assert found == ends
    assert [warned in text for text in said] == [True] * bool(warned)


def test_what_is_made_of_a_batch_is_remembered_from_pass_to_pass() -> None:
    ready = prepared(pk.Single(), accumulation=4, samples=8)
    assert [trained(ready, iter((4, 4)))[0] for _ in range(2)] == ["...|...|"] * 2
    whole = prepared(pk.Single(), accumulation=4, samples=4)
    assert trained(whole, iter((2,)))[0] == "||", "nothing tells how many the only batch will make"


def test_a_run_that_is_resumed_before_the_last_batch_of_a_pass_knows_what_batches_make(tmp_path: Path) -> None:
    """Else the first micro-batch of the last batch would end its window, and the second begin one of its own."""
    ready = prepared(pk.Single(), accumulation=4, samples=20)
    for at, batch in enumerate(ready.loaders[0]):
        for part in batch.chunk(2):
            ready.backward(ready.model(part).square().mean())
            ready.step()
        if at == 3:
            ready.save(str(tmp_path))
    again = prepared(pk.Single(), accumulation=4, samples=20)
    assert again.resume(str(tmp_path))
    assert trained(again, iter((2,)))[0] == ".|"
    assert torch.equal(again.model.weight, ready.model.weight)


def test_a_checkpoint_in_the_middle_of_a_batch_is_warned_of(tmp_path: Path) -> None:
    """Windows of two micro-batches and batches of three: the second window ends with the first of a batch."""
    ready, told = prepared(pk.Single(), accumulation=2, samples=18, batch=6), []
    for batch in ready.loaders[0]:
        for part in batch.chunk(3):
            ready.backward(ready.model(part).square().mean())
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                if ready.step():
                    ready.save(str(tmp_path))
            found = [one.message.finding for one in heard if isinstance(one.message, FindingWarning)]
            told.append([one.what for one in found if one.rule == "loop.saved-inside-batch"])
    assert [len(one) for one in told] == [0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert told[3][0].startswith("the batch in use has made 1 of 3 micro-batches, and a resume goes on with the next")


@pytest.mark.parametrize("left", [0, 1], ids=["left out", "fewer"])
def test_a_window_that_goes_on_over_the_end_of_a_pass_is_told_once(left: int) -> None:
    ready = prepared(pk.Single(), accumulation=4)
    assert trained(ready, iter((2, 2, 2, 2, 2, left)))[1] == []
    for expected in (1, 0):
        _, said = trained(ready, iter((2, 2, 2, 2, 2, left)))
        assert len(said) == expected
        assert all("a window of 4 micro-batches goes on over the end of a pass" in one for one in said)


def by_ranks(rank: int, world: int, engine: Any) -> tuple[str, list[list[float]]]:
    """Where windows end, and the weights after three passes whose batches are cut in two."""
    del rank, world
    if isinstance(engine, pk.DeepSpeed):
        lean()
    ready = prepared(engine, accumulation=4)
    ends = "".join(trained(ready, iter((2,) * 3))[0] for _ in range(3))
    weight = ready.unwrap().weight
    return ends, getattr(weight, "full_tensor", lambda: weight)().tolist()


@pytest.mark.parametrize(
    "engine", [pk.DDP(), pk.FSDP2(), pk.DeepSpeed(stage=2)], ids=lambda engine: type(engine).__name__
)
def test_ranks_average_where_the_window_ends(engine: Any, gang2: Gang) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = SAMPLES.chunk(12)
    windows = [(0, 2, 1, 3, 4, 6, 5, 7), (8, 10, 9, 11)]  # of batches of four samples, each rank cuts its own in two
    for at in 3 * windows:
        for part in at:
            (model(parts[part]).square().mean() / 2 / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    for ends, weight in gang2.run(by_ranks, engine, timeout=90):
        assert ends == "...|.|" * 3
        torch.testing.assert_close(torch.tensor(weight), model.weight.detach(), rtol=1e-5, atol=1e-6)
