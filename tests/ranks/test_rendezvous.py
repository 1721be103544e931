"""Ranks find each other before there is a group: whoever is missing, or was started wrongly, is named on every rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import prepkit as pk
from prepkit import config as c
from prepkit.facts import Env
from tests.ranks.test_all_or_none import SOON_S, Heard, heard
from tests.support.fragile_model import TOKENS, Tiny
from tests.support.gang import Gang
from tests.support.launch import launch, torchrun


def applied(world: int, timeout_s: float = 30.0, engine: c.Engine | None = None, **more: Any) -> pk.Prepared:
    cfg = c.Config(engine=engine or c.DDP(), optimizer=c.AdamW(), timeout_s=timeout_s, **more)
    return pk.apply(pk.build_plan(cfg, Tiny(), env=Env(world_size=world)))


def starts_wrongly(rank: int, world: int, how: str) -> Heard:
    if rank == 2:
        match how:
            case "absent":
                return "", "", 0.0
            case "other size":
                os.environ["WORLD_SIZE"] = "3"
            case "other rank":
                os.environ["RANK"] = "1"
    return heard(lambda: applied(world, 3.0))


@pytest.mark.parametrize(
    ("how", "who", "text"),
    [
        ("absent", (0, 1, 3), "not all 4 ranks came within 3 s; missing: 2; their logs say why"),
        ("other size", (0, 1, 3), "on rank 2; start all processes with the same number"),
        ("other rank", (0, 3), "missing: 2; their logs say why"),
    ],
)
def test_of_four_ranks_the_one_that_does_not_come_or_was_started_wrongly_is_named(
    gang4: Gang, how: str, who: tuple[int, ...], text: str
) -> None:
    found = gang4.run_fresh(starts_wrongly, how)
    for rank in who:
        kind, said, seconds = found[rank]
        assert kind == "RankFailed"
        assert text in said
        assert "keys:" not in said
        assert seconds < SOON_S
    if how == "other size":
        assert "WORLD_SIZE is 4 on rank 0 and 3 on rank 2" in found[0][1]
        assert "WORLD_SIZE is 3 on rank 2 and 4 on rank" in found[2][1]
    if how == "other rank":
        assert any("two processes were started with RANK=1" in found[rank][1] for rank in (1, 2))


def no_rank_0(rank: int, world: int) -> Heard:
    return heard(lambda: applied(world, 2.0)) if rank else ("", "", 0.0)


def test_where_rank_0_does_not_come_the_store_that_it_serves_is_named_with_its_address(gang2: Gang) -> None:
    kind, text, seconds = gang2.run_fresh(no_rank_0)[1]
    assert kind == "RankFailed"
    assert "the rendezvous store at 127.0.0.1:" in text
    assert "rank 0, which serves it, has not come, or has ended" in text
    assert seconds < SOON_S


def again(rank: int, world: int) -> list[tuple[float, bool]]:
    """Three applies, each with a group of its own; the loss of each, and whether torch's hook came and went."""

    def torchs() -> bool:
        return "_distributed_excepthook" in sys.excepthook.__qualname__

    found = []
    for engine in (c.DDP(), c.FSDP2(), c.DDP()):
        ready = applied(world, engine=engine)
        loss = ready.model(TOKENS).float().square().mean()
        ready.backward(loss)
        ready.step()
        inside = torchs()
        ready.close()
        found.append((loss.item(), inside and not torchs()))
    return found


def test_a_process_applies_and_closes_any_number_of_times_and_leaves_the_hook_for_uncaught_errors_as_it_was(
    gang2: Gang,
) -> None:
    assert all(hook for rank in gang2.run_fresh(again) for _, hook in rank)


SCRIPT = """
import atexit

import torch
import torch.distributed as dist

import prepkit as pk
from tests.support.fragile_model import TOKENS, Tiny

atexit.register(lambda: print(f"at its end a group runs: {dist.is_initialized()}"))
for number in range(3):
    cfg = pk.Config(engine=(pk.DDP(), pk.FSDP2(), pk.DDP())[number], optimizer=pk.optim.AdamW(), timeout_s=60.0)
    torch.manual_seed(0)
    ready = pk.apply(pk.build_plan(cfg, Tiny()))
    ready.backward(ready.model(TOKENS).float().square().mean())
    ready.step()
    if number < 2:  # the last is left as it is, as many programs end
        ready.close()
    print(f"apply {number} is over")
"""


def test_under_torchrun_a_process_applies_three_times_and_may_end_without_a_close(tmp_path: Path) -> None:
    script = tmp_path / "again.py"
    script.write_text(SCRIPT, encoding="utf-8")
    root = str(Path(__file__).parents[2])
    environment = {"PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    said = launch([*torchrun(2), str(script)], environment, 120.0)
    assert [said.count(f"apply {number} is over") for number in range(3)] == [2, 2, 2]
    assert said.count("at its end a group runs: False") == 2
