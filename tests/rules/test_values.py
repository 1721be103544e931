"""Numbers that are out of range."""

from __future__ import annotations

import pytest

from prepkit.config import DDP, FSDP1, FSDP2, XLA, AdamW, ClipNorm, Config, Engine, KeepLoaders
from prepkit.testing.tiny import tiny_facts
from tests.support.rule_findings import rule_ids


@pytest.mark.parametrize(
    "spec",
    [
        AdamW(lr=-1.0),
        AdamW(lr=float("nan")),
        AdamW(lr=float("inf")),
        AdamW(betas=(1.0, 0.9)),
        AdamW(betas=(0.9, -0.1)),
        AdamW(eps=-1e-8),
        AdamW(weight_decay=-0.1),
    ],
)
def test_numbers_that_torch_refuses_are_refused_here(spec: AdamW) -> None:
    assert rule_ids(Config(optimizer=spec), tiny_facts(optimizer=False)) == ["values.optimizer"]


@pytest.mark.parametrize(("limit", "fires"), [(1.0, 0), (float("inf"), 1), (0.0, 1), (-1.0, 1), (float("nan"), 1)])
def test_gradients_are_clipped_to_a_limit_above_zero(limit: float, fires: int) -> None:
    assert rule_ids(Config(clip=ClipNorm(limit))) == ["values.clip"] * fires


@pytest.mark.parametrize(
    ("engine", "world", "fires"), [(XLA(), 2, 1), (XLA(), 1, 0), (FSDP2(), 2, 0), (DDP(), 2, 0), (FSDP1(), 2, 0)]
)
def test_averaging_in_every_micro_batch_is_refused_where_it_would_save_nothing(
    engine: Engine, world: int, fires: int
) -> None:
    cfg = Config(engine=engine, average_each=True, loaders=KeepLoaders())
    found = rule_ids(cfg, tiny_facts(world=world))
    assert found.count("values.average-each") == fires
