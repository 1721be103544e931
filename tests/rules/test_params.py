"""Parameters with hooks, and parameters that a module's own forward writes."""

from __future__ import annotations

import pytest
from attrs import evolve

from prepkit.config import DDP, FSDP1, FSDP2, Config, DeepSpeed, Engine, Single, TensorParallel, TPLayer, TPPlan
from prepkit.testing.tiny import tiny_facts, tiny_model
from tests.support.rule_findings import rule_ids

ROWS = TPPlan((TPLayer("layers.*.mlp", "colwise"),))


@pytest.mark.parametrize(
    ("engine", "name", "rules"),
    [
        (TensorParallel(), "layers.0.mlp.weight", ["params.hooks-lost"]),
        (TensorParallel(), "norm.weight", []),
        (FSDP2(), "norm.weight", ["params.hooks-lost"]),
        (FSDP2(ignored=("norm",)), "norm.weight", ["params.hooks-local"]),
        (FSDP1(), "norm.weight", ["params.hooks-lost"]),
        (FSDP1(ignored=("norm",)), "norm.weight", ["params.hooks-local"]),
        (DDP(), "norm.weight", ["params.hooks-local"]),
    ],
    ids=str,
)
def test_a_hook_is_lost_with_the_tensor_that_has_it_and_else_sees_one_rank(
    engine: Engine, name: str, rules: list[str]
) -> None:
    model = evolve(tiny_model(), param_hooks=((name, "register_hook"),))
    plan = {"tp_plan": ROWS} if isinstance(engine, TensorParallel) else {}
    found = rule_ids(evolve(Config(engine=engine), **plan), tiny_facts(model, world=2))
    assert [rule for rule in found if rule.startswith("params.")] == rules


@pytest.mark.parametrize(
    ("engine", "world", "fires"),
    [
        (Single(), 1, 0),
        (DDP(), 1, 0),
        (DDP(), 2, 1),
        (FSDP1(), 1, 1),
        (FSDP2(), 1, 1),
        (FSDP2(), 2, 1),
        (DeepSpeed(stage=2, micro_batch=2), 1, 1),
    ],
    ids=str,
)
def test_what_a_forward_writes_is_lost_where_weights_are_gathered_and_drifts_where_they_are_copied(
    engine: Engine, world: int, fires: int
) -> None:
    model = evolve(tiny_model(), self_written=(("embed.weight", "max_norm=1.0"),))
    assert rule_ids(Config(engine=engine), tiny_facts(model, world=world)).count("params.self-written") == fires
