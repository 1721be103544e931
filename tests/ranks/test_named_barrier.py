"""A barrier that names who is late, went elsewhere or has ended; and what the main process does first."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import prepkit as pk
from tests.support.gang import Gang, GangError
from tests.support.gang_worker import Raised


def prepared() -> Any:
    return pk.apply(pk.build_plan(pk.Config(engine=pk.DDP(), optimizer=pk.optim.AdamW()), nn.Linear(2, 2)))


def refused(ready: Any, name: str, timeout_s: float = 30.0) -> tuple[int, str, float]:
    began = time.monotonic()
    with pytest.raises(pk.errors.RankFailed) as caught:
        ready.ranks.barrier(name, timeout_s=timeout_s)
    return caught.value.rank, str(caught.value), time.monotonic() - began


def meetings(rank: int, world: int) -> list[tuple[int, str, float]]:
    del world
    ready = prepared()
    if rank == 1:
        time.sleep(0.5)
    began = time.monotonic()
    ready.ranks.barrier("data ready")
    waited = time.monotonic() - began
    assert (waited > 0.3) == (rank == 0), waited
    ready.ranks.barrier("data ready")
    left = refused(ready, "evaluation" if rank else "data ready")
    if rank == 1:
        time.sleep(2.0)
    late = refused(ready, "exported", timeout_s=0.5)
    ready.ranks.barrier()
    assert not ready._peers.store.check(["barrier 1/0"]), "barriers that are over leave no keys"
    ready.close()
    return [left, late]


def test_a_barrier_meets_ranks_of_one_name_and_names_who_is_late_or_elsewhere(gang2: Gang) -> None:
    of_zero, of_one = gang2.run_fresh(meetings)
    for rank, what, took in (of_zero[0], of_one[0]):
        assert rank in (0, 1)
        assert "it came to the barrier" in what
        assert "'evaluation'" in what
        assert "'data ready'" in what
        assert took < 5
    for rank, what, took in (of_zero[1], of_one[1]):
        assert rank == 1
        assert "barrier 'exported': not all 2 ranks came within 0 s; missing: 1" in what
        assert took < 2


def one_goes(rank: int, world: int) -> None:
    del world
    ready = prepared()
    if rank == 1:
        os._exit(3)
    ready.ranks.barrier("data ready", timeout_s=40)


def test_a_barrier_names_a_rank_that_has_ended_at_once(gang2: Gang) -> None:
    began = time.monotonic()
    with pytest.raises(GangError) as caught:
        gang2.run_fresh(one_goes)
    outcome = caught.value.outcomes[0]
    assert isinstance(outcome, Raised)
    assert "RankFailed: rank 1 of 2" in outcome.traceback
    assert "has ended" in outcome.traceback
    assert time.monotonic() - began < 30


def test_alone_a_barrier_is_passed() -> None:
    prepared_alone = pk.apply(pk.build_plan(pk.Config(optimizer=pk.optim.AdamW()), nn.Linear(2, 2)))
    prepared_alone.ranks.barrier("data ready")
    with pk.processes.main_process_first():
        assert prepared_alone.ranks.is_main


def first(rank: int, world: int, folder: str) -> list[bool]:
    del world
    file = Path(folder, "data")
    seen = []
    with pk.processes.main_process_first():
        seen.append(file.exists())
        if rank == 0:
            time.sleep(0.5)
            file.write_text("here")
    if rank == 0:
        with pk.processes.main_process_first():  # which the other one leaves out: nobody waits for it
            pass
    ready = prepared()
    with pk.processes.main_process_first():
        seen.append(Path(folder, "more").exists())
        Path(folder, "more").touch()
    os.environ["LOCAL_RANK"] = "0"
    began = time.monotonic()
    if rank == 0:
        time.sleep(1.0)
    with pk.processes.main_process_first(per_node=True):  # each is the first of its node
        assert time.monotonic() - began < 0.9 or rank == 0
    ready.close()
    return seen


def test_the_main_process_goes_first_before_apply_and_after_it(gang2: Gang, tmp_path: Path) -> None:
    assert gang2.run_fresh(first, str(tmp_path)) == [[False, False], [True, True]]


def fails_first(rank: int, world: int) -> str:
    del world

    def download() -> None:
        with pk.processes.main_process_first():
            assert rank == 0, "the other never gets in"
            raise OSError("no space left")

    with pytest.raises((OSError, pk.errors.RankFailed)) as caught:
        download()
    return f"{caught.type.__name__}: {caught.value}"


def test_what_the_first_raises_ends_the_wait_of_the_others(gang2: Gang) -> None:
    assert gang2.run_fresh(fails_first) == [
        "OSError: no space left",
        "RankFailed: rank 0 of 2, which goes first, failed: OSError: no space left",
    ]


@pytest.mark.parametrize(
    ("limit", "error"),
    [
        ("60", TypeError),
        (None, TypeError),
        (True, TypeError),
        (0, ValueError),
        (-1.0, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
    ],
)
def test_a_wait_without_a_limit_that_can_be_kept_is_refused_also_in_a_process_alone(
    limit: Any, error: type[Exception]
) -> None:
    ready = pk.apply(pk.build_plan(pk.Config(optimizer=pk.optim.AdamW()), nn.Linear(2, 2)))
    entered = []
    with pytest.raises(error, match=r"timeout_s=.* write seconds"):
        ready.ranks.barrier("data ready", timeout_s=limit)
    with pytest.raises(error, match=r"timeout_s=.* write seconds"), pk.processes.main_process_first(timeout_s=limit):
        entered.append(limit)
    assert not entered


def test_what_is_no_name_of_a_barrier_is_refused() -> None:
    ready = pk.apply(pk.build_plan(pk.Config(optimizer=pk.optim.AdamW()), nn.Linear(2, 2)))
    with pytest.raises(TypeError, match=r"3 is no name of a barrier; write text"):
        ready.ranks.barrier(3)
    with (
        pytest.raises(TypeError, match=r"per_node='yes': write True or False"),
        pk.processes.main_process_first(per_node="yes"),
    ):  # type: ignore[arg-type]  # on purpose
        pass
    ready.ranks.barrier("data ready", timeout_s=5)
