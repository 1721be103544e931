"""DeepSpeed under torch's fake process group: what ZeRO holds on every rank is what the plan says."""

from __future__ import annotations

import os
from typing import Any

import pytest
from torch import nn
from torch.optim import AdamW

from prepkit.applying.rehearse import Rehearsal, rehearse_here
from prepkit.config import BF16, Config, DeepSpeed, Precision
from prepkit.facts import Env
from prepkit.observe import observe
from prepkit.plan import Plan
from prepkit.planner import plan
from tests.support.deepspeed_cpu import lean
from tests.support.fragile_model import Tiny

pytest.importorskip("deepspeed", reason="the extra prepkit[deepspeed] is not installed")
lean()


def made(stage: int, world: int, precision: Precision, model: nn.Module, **more: Any) -> Plan:
    optimizer = AdamW([param for param in model.parameters() if param.requires_grad])
    cfg = Config(engine=DeepSpeed(stage=stage, micro_batch=1, **more), precision=precision)
    return plan(cfg, observe(model, optimizer=optimizer, env=Env(world_size=world)).facts).unwrap()


def rehearsed(stage: int, world: int, rank: int, precision: Precision = None) -> Rehearsal:  # frozen
    model = Tiny()
    return rehearse_here(made(stage, world, precision, model), model, rank=rank)


@pytest.mark.parametrize("precision", [None, BF16()], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("world", "rank"), [(2, 1), (3, 2), (8, 5), (64, 63)])
def test_zero_three_gives_every_rank_an_equal_part_of_each_parameter(
    world: int, rank: int, precision: Precision
) -> None:
    seen = rehearsed(3, world, rank, precision)
    assert seen.fine, str(seen)
    for name, form in seen.params:
        size = form.shape[0] * (form.shape[1] if len(form.shape) > 1 else 1)
        assert form.local_shape == (-(-size // world),), name
        assert form.dtype == ("bfloat16" if precision == BF16() else "float32")


@pytest.mark.parametrize(("stage", "world", "rank"), [(0, 8, 7), (1, 64, 63), (2, 2, 1), (2, 64, 17)])
def test_lower_stages_keep_parameters_whole(stage: int, world: int, rank: int) -> None:
    seen = rehearsed(stage, world, rank)
    assert seen.fine, str(seen)
    assert all(form.placements == () and form.local_shape == form.shape for _, form in seen.params)


def test_a_dtype_that_deepspeed_does_not_make_is_a_difference() -> None:
    from attrs import evolve

    model = Tiny()
    right = made(3, 4, BF16(), model)
    layout = tuple(evolve(one, dtype="float32") if one.name == "layers.0.scale" else one for one in right.layout)
    seen = rehearse_here(evolve(right, layout=layout), model)
    (one,) = seen.differences
    assert (one.where, one.what) == ("model.layers.0.scale", "dtype planned float32, found bfloat16")


def test_a_rehearsed_rank_leaves_the_environment_and_torch_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    before, linear = dict(os.environ), nn.functional.linear
    assert rehearsed(3, 4, 3).fine
    assert dict(os.environ) == before
    assert nn.functional.linear is linear
