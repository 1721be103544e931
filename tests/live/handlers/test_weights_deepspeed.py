"""A model without values is filled before DeepSpeed gets it, at ZeRO-3 part by part, and learns as the plain one."""

from __future__ import annotations

from pathlib import Path

import pytest

import prepkit as pk
from tests.support.deepspeed_cpu import lean
from tests.support.filled_models import FROM, filled
from tests.support.gang import Gang
from tests.support.meta_models import saved

pytest.importorskip("deepspeed", reason="the extra prepkit[deepspeed] is not installed")


def every(rank: int, world: int, cfg: pk.Config, family: str, path: str) -> dict[str, float]:
    """The largest difference of each kind, over all sources of values."""
    lean()
    runs = [filled(rank, world, cfg, family, source, path, 2) for source in FROM]
    return {key: max(run[key] for run in runs) for key in runs[0]}


@pytest.mark.parametrize(("stage", "family"), [(0, "llama-tied"), (2, "llama-tied"), (3, "llama-tied"), (3, "gpt2")])
def test_each_stage_gets_the_values_and_learns_what_the_plain_model_learns(
    gang2: Gang, tmp_path: Path, stage: int, family: str
) -> None:
    cfg = pk.Config(engine=pk.DeepSpeed(stage=stage, micro_batch=2, config={"zero_allow_untested_optimizer": True}))
    for rank in gang2.run(every, cfg, family, saved(tmp_path, family), timeout=120):
        assert rank["values"] == 0
        assert max(rank["loss"], rank["step"]) < 1e-6
