"""The end: the wrapper goes before its process group does, on every rank."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import prepkit as pk
from prepkit.config import DDP, FSDP2, AdamW, Config, Engine, Single
from prepkit.facts import Env
from prepkit.live.ranks import end_groups
from prepkit.live.training.prepared import Prepared
from prepkit.live.training.trackers import JsonLines
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


@pytest.mark.parametrize("engine", [DDP(), FSDP2()], ids=["ddp", "fsdp2"])
def test_closing_lets_go_of_the_wrapper_and_ends_the_group_that_apply_started(gang2: Gang, engine: Engine) -> None:
    assert gang2.run_fresh(closes, engine) == [(True, True, True, True)] * 2


@pytest.mark.parametrize("engine", [DDP(), FSDP2()], ids=["ddp", "fsdp2"])
def test_a_group_that_was_there_before_goes_on(gang2: Gang, engine: Engine) -> None:
    assert gang2.run(closes, engine) == [(True, True, False, True)] * 2


def test_one_process_without_a_group_has_nothing_to_end() -> None:
    ready = trained(Single(), 1)
    ready.close()
    assert torch.isfinite(ready.model(TOKENS)).all()
    gc.collect()
    assert not dist.is_initialized()


def cut_twice(rank: int, world: int, elsewhere: str) -> float:
    """Loss of a cut model under a second default group, whose groups have other names than those of the first."""
    rows = pk.TPPlan((pk.TPLayer("layers.*.inner", "colwise"), pk.TPLayer("layers.*.outer", "rowwise")))
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
        "log_to": lambda: ready.log_to(JsonLines(str(tmp_path / "log"))),
        "barrier": lambda: ready.barrier("end"),
        "accumulate": lambda: ready.accumulate(last=True),
        "reduce": lambda: ready.reduce(1.0),
        "gather": lambda: ready.gather(1.0),
        "gather_for_metrics": lambda: ready.gather_for_metrics(torch.zeros(2)),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=rf"^ready\.{name}\(\) was called after ready\.close\(\)"):
            call()
    assert list(tmp_path.iterdir()) == []
