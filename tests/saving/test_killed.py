"""A run that is killed, at any moment and while it saves, or told to end, goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import prepkit as pk
from prepkit.findings import RunRefused
from prepkit.saving import folder as folders
from prepkit.saving import writing
from prepkit.training.preemption import CODE, Preempted
from tests.support.gang import Gang, GangError

STEPS = 8


def prepared() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    cfg = pk.Config(engine=pk.FSDP2(wrap=pk.wrap.WrapRoot()), accumulation=2, scheduler_ticks=1)
    return pk.apply(pk.build_plan(cfg, model, optimizer=optimizer, scheduler=scheduler))


def window(ready: Any) -> float:
    """One optimizer step on data that is drawn, with dropout: whoever loses a random state trains otherwise."""
    total = 0.0
    for _ in range(2):
        batch = torch.rand(4, 8)
        loss = (ready.model(batch) - batch).square().mean()
        ready.backward(loss)
        ready.step()
        total += float(loss.detach())
    return total


def run(rank: int, world: int, folder: str, log: str, seed: int | None) -> int:
    """Trains to the end, from the last checkpoint on; with a seed one rank is killed at a moment that it draws."""
    del world
    ready = prepared()
    if folders.checkpoints(folder):
        ready.resume(folder)
    draw = random.Random(seed)
    victim, at, how = (
        draw.randrange(2),
        draw.randrange(ready.steps + 1, STEPS),
        draw.choice(("save", "write", "publish", "later")),
    )
    while ready.steps < STEPS:
        loss = window(ready)
        with Path(f"{log}-{rank}").open("a") as file:
            file.write(json.dumps([ready.steps, loss]) + "\n")
        if seed is not None and rank == (0 if how == "publish" else victim) and ready.steps >= at:
            kill(how, draw.random())
        ready.save(folder, wait=ready.steps % 2 == 0)
    ready.close()
    return int(ready.steps)


def kill(how: str, after: float) -> None:
    def now(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    match how:
        case "write":
            writing.write = now
        case "publish":
            folders.publish = now
        case "save":
            now()
        case _:
            threading.Timer(0.05 * after, now).start()


def curve(log: str, rank: int) -> dict[int, set[float]]:
    """Every loss that was written down for a step; a step that was lost is taken again."""
    found: dict[int, set[float]] = {}
    for line in Path(f"{log}-{rank}").read_text().splitlines():
        step, loss = json.loads(line)
        found.setdefault(step, set()).add(loss)
    return found


def test_a_run_that_is_killed_again_and_again_has_the_losses_of_one_that_never_was(gang2: Gang, tmp_path: Path) -> None:
    calm, killed = str(tmp_path / "calm.log"), str(tmp_path / "killed.log")
    gang2.run(run, str(tmp_path / "calm"), calm, None, timeout=60)
    for seed in (13, 9):
        with pytest.raises(GangError, match="exit code -9"):
            gang2.run(run, str(tmp_path / "killed"), killed, seed, timeout=60)
    assert gang2.run(run, str(tmp_path / "killed"), killed, None, timeout=60) == [STEPS] * 2
    for rank in (0, 1):
        wanted = curve(calm, rank)
        assert sorted(wanted) == list(range(1, STEPS + 1))
        assert curve(killed, rank) == wanted, "to the bit, also of steps that were taken twice"


def told_to_end(rank: int, world: int, folder: str) -> tuple[int, int]:
    """One rank of two is sent SIGTERM; the exit code, and the steps that were saved."""
    del world
    ready = prepared()
    try:
        with pk.processes.save_on_sigterm(ready, folder):
            for step in range(STEPS):
                if step == 2 and rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                window(ready)
    except Preempted as ended:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        again = prepared()
        again.resume(folder)
        return int(str(ended.code)), again.steps
    raise AssertionError("it was not told")


def test_sigterm_to_one_rank_saves_on_all_at_the_same_window_and_leaves_with_the_code_of_sigterm(
    gang2: Gang, tmp_path: Path
) -> None:
    assert gang2.run(told_to_end, str(tmp_path), timeout=60) == [(CODE, 4)] * 2
    assert CODE == 143


def one_window_and_sigterm(ready: Any, folder: str) -> None:
    with pk.processes.save_on_sigterm(ready, folder):
        ready.backward(ready.model(torch.ones(1, 2)).sum())
        os.kill(os.getpid(), signal.SIGTERM)
        ready.step()


def test_a_signal_is_handled_in_the_main_thread_alone(tmp_path: Path) -> None:
    ready = pk.apply(pk.build_plan(pk.Config(optimizer=pk.optim.AdamW()), nn.Linear(2, 2)))

    def elsewhere() -> None:
        with pk.processes.save_on_sigterm(ready, str(tmp_path)):
            pytest.fail("it was entered")

    with ThreadPoolExecutor() as pool, pytest.raises(RunRefused, match=r"sigterm\.other-thread .* in the thread '"):
        pool.submit(elsewhere).result()


def test_sigterm_in_the_last_window_saves_as_well(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    ready = pk.apply(pk.build_plan(pk.Config(optimizer=pk.optim.AdamW()), model))
    with pytest.raises(SystemExit) as caught:
        one_window_and_sigterm(ready, str(tmp_path))
    assert caught.value.code == 143
    assert len(folders.checkpoints(str(tmp_path))) == 1
