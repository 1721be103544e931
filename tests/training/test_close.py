"""The end: the wrapper goes before its process group does, on every rank."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import prepkit as pk
from prepkit.config import DDP, FSDP1, FSDP2, AdamW, Config, Engine, Single
from prepkit.facts import Env
from prepkit.findings import FindingWarning
from prepkit.ranks import end_groups
from prepkit.training.prepared import Prepared
from prepkit.training.trackers import JsonLines
from tests.support.fp8_model import seeded
from tests.support.fragile_model import TOKENS, Tiny
from tests.support.gang import Gang


def trained(engine: Engine, world: int) -> Prepared:
    plan = pk.build_plan(Config(engine=engine, optimizer=AdamW()), Tiny(), env=Env(world_size=world))
    ready = pk.apply(plan)
    ready.backward(ready.model(TOKENS).float().square().mean())
    ready.step()
    return ready


def closes(rank: int, world: int, engine: Engine) -> tuple[bool, bool, bool, bool]:
    """Whether the group ran, the wrapper has gone, the group has, and the given module is what is left."""
    ready = trained(engine, world)
    wrapper = weakref.ref(ready.model)
    ran = dist.is_initialized()
    ready.close()
    ready.close()
    gone = wrapper() is None or isinstance(engine, FSDP2)  # FSDP2 wraps nothing around the root
    return ran, gone, not dist.is_initialized(), isinstance(ready.model, Tiny)


@pytest.mark.parametrize("engine", [DDP(), FSDP1(), FSDP2()], ids=["ddp", "fsdp1", "fsdp2"])
def test_closing_lets_go_of_the_wrapper_and_ends_the_group_that_apply_started(gang2: Gang, engine: Engine) -> None:
    assert gang2.run_fresh(closes, engine) == [(True, True, True, True)] * 2


@pytest.mark.parametrize("engine", [DDP(), FSDP1(), FSDP2()], ids=["ddp", "fsdp1", "fsdp2"])
def test_a_group_that_was_there_before_goes_on(gang2: Gang, engine: Engine) -> None:
    assert gang2.run(closes, engine) == [(True, True, False, True)] * 2


def fails_alone(rank: int, world: int) -> tuple[str, float]:
    """The error that comes out of ``finally: ready.close()`` on rank 1, and the seconds that it was held back.

    Rank 0 is busy for a while and comes to its own ``close`` then.
    """
    plan = pk.build_plan(Config(engine=DDP(), optimizer=AdamW()), Tiny(), env=Env(world_size=world))
    ready = pk.apply(plan)
    raised = 0.0
    try:
        try:
            time.sleep(0.0 if rank else BUSY_S)
            raised = time.monotonic()
            raise ValueError(f"rank {rank}'s own error")
        finally:
            ready.close()
    except ValueError as error:
        return str(error), time.monotonic() - raised


BUSY_S = 8.0


def test_an_error_of_one_rank_comes_out_of_its_close_before_the_others_come(gang2: Gang) -> None:
    (other, _), (own, held_back_s) = gang2.run_fresh(fails_alone, timeout=60)
    assert (other, own) == ("rank 0's own error", "rank 1's own error")
    assert held_back_s < BUSY_S / 2


def test_one_process_without_a_group_has_nothing_to_end() -> None:
    ready = trained(Single(), 1)
    ready.close()
    assert torch.isfinite(ready.model(TOKENS)).all()
    gc.collect()
    assert not dist.is_initialized()


def closes_beside(rank: int, world: int) -> tuple[bool, float, list[str], bool]:
    """Whether the group outlives a close beside another's wrapper, what that computes then, and the end without it."""
    ready = trained(DDP(), world)
    others = [DistributedDataParallel(torch.nn.Linear(1, 1))]
    if rank == 0:
        others.clear()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", FindingWarning)
        ready.close()
    told = [str(one.message) for one in heard if isinstance(one.message, FindingWarning)]
    ran = dist.is_initialized()
    total = torch.ones(())
    dist.all_reduce(total)
    others.clear()
    gc.collect()
    again = trained(DDP(), world)
    again.close()
    return ran, total.item(), told, dist.is_initialized()


def test_a_group_that_another_wrapper_uses_on_one_rank_is_ended_on_none(gang2: Gang) -> None:
    of_zero, of_one = gang2.run_fresh(closes_beside)
    left = (
        "warning run.group-in-use at process group: A wrapper on another rank still uses it\n"
        "  fix: Delete the other model's wrapper before ready.close()."
    )
    assert of_zero == (True, 2.0, [left], True)
    assert of_one == (True, 2.0, [], True)


def closes_while_a_variable_holds_it(rank: int, world: int) -> list[str]:
    ready = trained(DDP(), world)
    forward = ready.model
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", FindingWarning)
        ready.close()
    assert isinstance(forward, DistributedDataParallel)
    return [str(one.message).splitlines()[0] for one in heard if isinstance(one.message, FindingWarning)]


def test_a_variable_that_holds_the_own_wrapper_is_told_as_that(gang2: Gang) -> None:
    told = gang2.run_fresh(closes_while_a_variable_holds_it)
    what = "1 wrapper here (DistributedDataParallel) of the model that is closed still uses it"
    assert told == [[f"warning run.group-in-use at process group: {what}: a variable holds what ready.model was"], []]


def closes_with_its_loss(rank: int, world: int) -> tuple[list[str], bool]:
    """What is told, and whether the group runs on, where a script still has the last loss."""
    ready = trained(FSDP1(), world)
    loss = ready.model(TOKENS).sum()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", FindingWarning)
        ready.close()
    assert loss.grad_fn is not None
    return [str(one.message) for one in heard if isinstance(one.message, FindingWarning)], dist.is_initialized()


def test_a_loss_that_a_script_still_has_keeps_no_group(gang2: Gang) -> None:
    assert gang2.run_fresh(closes_with_its_loss) == [([], False)] * 2


def closes_of_two(rank: int, world: int, engine: Engine, first: int) -> tuple[list[bool], list[str]]:
    """Whether the group runs after each close of two that train beside each other, and what is told."""
    both = [trained(engine, world), trained(engine, world)]
    running = []
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", FindingWarning)
        both.pop(first).close()
        running.append(dist.is_initialized())
        (last,) = both
        last.backward(last.model(TOKENS).sum())
        last.step()
        last.close()
        running.append(dist.is_initialized())
    return running, [str(one.message) for one in heard if "group" in str(one.message)]


@pytest.mark.parametrize("engine", [DDP(), FSDP2()], ids=["DDP", "FSDP2"])
@pytest.mark.parametrize("first", [0, 1])
def test_of_two_that_train_the_last_that_is_closed_ends_the_group(gang2: Gang, engine: Engine, first: int) -> None:
    assert gang2.run_fresh(closes_of_two, engine, first) == [([True, False], [])] * 2


GOES_ON = """
import sys

import torch
import torch.distributed as dist
from torch import nn

import prepkit as pk
from prepkit.ranks import end_groups

rest = end_groups.until_threads_rest
end_groups.until_threads_rest = lambda: (print("waits for gloo's threads"), rest())
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
other = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
ready = pk.apply(pk.build_plan(pk.Config(engine=pk.DDP(), optimizer=pk.optim.AdamW()), nn.Linear(2, 2)))
ready.backward(ready.model(torch.ones(1, 2)).sum())
ready.step()
ready.close()
sys.setswitchinterval(2.0)  # seconds: threads of gloo come to the interpreter when this one lets go of it
for size in (1, 1 << 20, 1 << 23, 1 << 25):
    dist.all_gather([torch.empty(size)], torch.ones(size), async_op=True)
if len(sys.argv) > 1:
    dist.destroy_process_group()
"""
"""The last works of a group are in the hands of gloo's threads when the script ends, and a wrapper holds the group."""


@pytest.mark.parametrize("ends", [(), ("ends the group",)], ids=["left", "ended"])
def test_a_run_whose_last_work_is_with_gloo_at_its_end_does_not_abort(tmp_path: Path, ends: tuple[str, ...]) -> None:
    script = tmp_path / "script.py"
    script.write_text(GOES_ON)
    environment = {**os.environ, "PYTHONPATH": str(Path(pk.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, *ends]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "waits for gloo's threads\n"


def cut_twice(rank: int, world: int, elsewhere: str) -> float:
    """Loss of a cut model under a second default group, whose groups have other names than those of the first."""
    rows = pk.tp.TPPlan((pk.tp.TPLayer("layers.*.inner", "colwise"), pk.tp.TPLayer("layers.*.outer", "rowwise")))
    cfg = Config(engine=FSDP2(), mesh=pk.Mesh(tensor=2), tp_plan=rows, optimizer=AdamW())
    for others in (0, 3):
        model = seeded()
        store = dist.FileStore(f"{elsewhere}-{others}", world)  # type: ignore[attr-defined]  # exported, but not in __all__
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        for _ in range(others):
            dist.new_group()
        ready = pk.apply(pk.build_plan(cfg, model, env=Env(world_size=world)))
        loss = ready.model(TOKENS).square().mean().item()
        ready.close()
        held = end_groups.end()
        del held
    return loss


def test_cut_layers_go_on_under_another_default_group(gang4: Gang, tmp_path: Path) -> None:
    with torch.no_grad():
        expected = float(seeded()(TOKENS).square().mean())
    assert gang4.run_fresh(cut_twice, str(tmp_path / "store")) == pytest.approx([expected] * 4, rel=1e-5)


def test_what_would_act_rank_by_rank_after_the_end_raises(tmp_path: Path) -> None:
    ready = trained(Single(), 1)
    ready.close()
    calls: dict[str, Callable[[], object]] = {
        "backward": lambda: ready.backward(torch.zeros((), requires_grad=True)),
        "step": ready.step,
        "save": lambda: ready.save(str(tmp_path)),
        "resume": lambda: ready.resume(str(tmp_path), missing_ok=True),
        "log": lambda: ready.log({"loss": 1.0}),
        "log.to": lambda: ready.log.to(JsonLines(str(tmp_path / "log"))),
        "ranks.barrier": lambda: ready.ranks.barrier("end"),
        "accumulate": lambda: ready.accumulate(last=True),
        "ranks.reduce": lambda: ready.ranks.reduce(1.0),
        "ranks.gather": lambda: ready.ranks.gather(1.0),
        "ranks.gather_for_metrics": lambda: ready.ranks.gather_for_metrics(torch.zeros(2)),
    }
    for name, call in calls.items():
        with pytest.raises(
            RuntimeError, match=rf"loop\.closed at ready\.{name}\(\): .* was called after ready\.close\(\)"
        ):
            call()
    assert list(tmp_path.iterdir()) == []
