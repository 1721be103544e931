"""A rank that waits long inside a call says where the others are, before any time-out."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from typing import Any

import pytest
import torch

import prepkit as pk
from prepkit.findings import FindingWarning
from prepkit.ranks import long_waits
from prepkit.ranks.long_waits import Doing, in_words
from tests.support.fragile_model import TOKENS, Tiny
from tests.support.gang import Gang


def _ready() -> Any:
    long_waits.LOOK_S, long_waits.LONG_S = 0.2, 2.0  # of this process of the gang, put back below
    cfg = pk.Config(engine=pk.DDP(), optimizer=pk.optim.AdamW())
    torch.manual_seed(0)
    ready: Any = pk.apply(pk.build_plan(cfg, Tiny()))
    ready.backward(ready.model(TOKENS).float().square().mean())
    ready.step()
    return ready


def _threads() -> int:
    return sum(thread.name == "prepkit: long waits" for thread in threading.enumerate())


def waits(rank: int, world: int, where: str) -> tuple[list[str], int, int]:
    """What a rank says while both are in a long evaluation, or while it waits in a barrier and the other sleeps."""
    del world
    before = (long_waits.LOOK_S, long_waits.LONG_S)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", FindingWarning)
        ready = _ready()
        running = _threads()
        if where == "evaluating":
            with ready.evaluating():
                time.sleep(4.0)
        else:
            for _ in range(2):
                time.sleep(4.0 if rank else 0.0)
                ready.ranks.barrier("here")
        ready.close()
    long_waits.LOOK_S, long_waits.LONG_S = before
    told = (one.message.finding for one in heard if isinstance(one.message, FindingWarning))
    said = [f"{one.where}: {one.what}" for one in told if one.rule == "run.rank-waits"]
    return said, running, _threads()


def test_a_rank_that_waits_for_one_that_is_elsewhere_says_so_once_for_each_call(gang2: Gang) -> None:
    (waiting, running, left), (sleeping, _, _) = gang2.run(waits, "barrier")
    assert len(waiting) == 2
    assert "rank 0: it has been in ready.ranks.barrier() for" in waiting[0]
    assert "while rank 1 has returned from ready.step()" in waiting[0]
    assert "while rank 1 has returned from ready.ranks.barrier()" in waiting[1]
    assert sleeping == []
    assert (running - left, left) == (1, running - 1)


def test_ranks_that_are_long_in_the_same_call_say_nothing(gang2: Gang) -> None:
    assert [said for said, _, _ in gang2.run(waits, "evaluating")] == [[], []]


def forgotten(rank: int, world: int) -> bool:
    """Whether the thread of a run that nobody holds, and nobody has closed, ends."""
    del rank, world
    ready = _ready()
    (own,) = [thread for thread in threading.enumerate() if thread is ready._waits.thread]
    del ready
    gc.collect()
    own.join(30.0)
    return not own.is_alive()


def test_the_thread_of_a_run_that_is_forgotten_ends(gang2: Gang) -> None:
    assert gang2.run(forgotten) == [True, True]


@pytest.mark.parametrize(
    ("elsewhere", "words"),
    [
        ([(1, Doing(call="", inside=False))], "rank 1 has returned from apply"),
        (
            [(rank, Doing(call="ready.step()", inside=True)) for rank in range(10)],
            "ranks 0, 1, 2, 3, 4, 5, 6, 7, … are in ready.step()",
        ),
    ],
)
def test_ranks_are_told_by_where_they_are(elsewhere: list[tuple[int, Doing]], words: str) -> None:
    assert in_words(elsewhere) == words
