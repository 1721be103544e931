"""One real run of each engine, proven window by window to be that of plain torch: what ``make quick`` trains."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from attrs import evolve

from prepkit import config as c
from tests.support.deepspeed_cpu import lean
from tests.support.drawn_training import Case, Sizes, proven
from tests.support.gang import Gang

SIZES = Sizes(blocks=2, width=4, vocab=8, tied=False, dtype=torch.float32, frozen=())
TP_PLAN = c.TPPlan((c.TPLayer("layers.*.mlp", "colwise", output_layout="replicate"), c.TPLayer("norm", "replicate")))
ENGINES: dict[str, tuple[c.Engine, int]] = {
    "Single": (c.Single(), 1),
    "DDP": (c.DDP(), 1),
    "FSDP1": (c.FSDP1(), 1),
    "FSDP2": (c.FSDP2(), 1),
    "TensorParallel": (c.TensorParallel(), 2),
    "DeepSpeed, stage 1": (c.DeepSpeed(stage=1, micro_batch=2), 1),
    "DeepSpeed, stage 3": (c.DeepSpeed(stage=3, micro_batch=2), 1),
}
"""Name to the engine, and how many ranks read the same data."""
ELSEWHERE = {"XLA": "needs torch_xla; its calls are recorded in tests/applying/handlers/test_xla.py"}


def case(name: str) -> Case:
    engine, parts = ENGINES[name]
    cfg = c.Config(
        engine=engine,
        optimizer=c.AdamW(lr=0.05),
        accumulation=2,
        clip=c.ClipNorm(0.5),
        checkpointing=c.CheckpointBlocks(),
    )
    cfg = evolve(cfg, tp_plan=TP_PLAN) if parts > 1 else cfg
    return Case(cfg=cfg, sizes=SIZES, given=False, parts=parts)


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "Single"])
def test_an_engine_on_two_processes_learns_what_plain_torch_learns(gang2: Gang, name: str) -> None:
    if name.startswith("DeepSpeed"):
        pytest.importorskip("deepspeed")
        gang2.run(without_slow_kernel)
    assert gang2.run(proven, case(name), timeout=120) == [[], []]


def without_slow_kernel(rank: int, world: int) -> None:
    lean()


def test_one_process_learns_what_plain_torch_learns() -> None:
    assert proven(0, 1, case("Single")) == []


def test_every_engine_is_run_here_or_has_a_reason() -> None:
    names = {name.partition(",")[0] for name in ENGINES}
    assert names | set(ELSEWHERE) == {kind.__name__ for kind in get_args(c.Engine)}
