"""Facts that were open or other when the plan was made: the rules are asked again with those that it meets."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve, fields

from prepkit import planner
from prepkit.config import BF16, DDP, FP8, FSDP1, FSDP2, CompileModel, Config, DeepSpeed
from prepkit.facts import Env, Facts
from prepkit.plan import Plan
from prepkit.testing import tiny_facts, tiny_model

OPEN = Env(world_size=8)


def planned(cfg: Config, env: Env) -> tuple[Plan, Facts]:
    facts = evolve(tiny_facts(tiny_model(width=16, vocab=16)), env=env)
    return planner.plan(cfg, facts).unwrap(), facts


CASES: dict[str, tuple[Config, Env, dict[str, Any], str]] = {
    "torch": (Config(engine=FSDP2()), OPEN, {"torch": "2.6.0"}, "environment.fsdp2-on-cpu"),
    "capability": (
        Config(engine=DDP(), precision=BF16()),
        evolve(OPEN, device="cuda"),
        {"capability": (7, 5)},
        "precision.bf16-unsupported",
    ),
    "bf16": (
        Config(engine=DDP(), precision=BF16()),
        evolve(OPEN, device="cuda"),
        {"bf16": False},
        "precision.bf16-unsupported",
    ),
    "libraries": (
        Config(engine=DeepSpeed(stage=2, micro_batch=1)),
        OPEN,
        {"libraries": (("transformers", "5.0.0"),)},
        "deepspeed.installed",
    ),
    "assumed": (
        Config(engine=DDP(), precision=FP8()),
        Env.declare(world_size=8, capability=(9, 0)),
        {"assumed": ()},
        "fp8.library-missing",
    ),
    "variables": (
        Config(engine=DDP(), compile=CompileModel()),
        OPEN,
        {"variables": (("TORCHDYNAMO_DISABLE", "1"),)},
        "compile.switched-off",
    ),
    "memory": (Config(engine=DDP()), OPEN, {"memory": 100}, "memory.exceeds-device"),
    "host_memory": (
        Config(engine=DDP()),
        evolve(OPEN, per_node=8),
        {"host_memory": 100},
        "memory.exceeds-host",
    ),
    "per_node": (
        Config(engine=FSDP1(sharding="HYBRID_SHARD")),
        evolve(OPEN, per_node=4),
        {"per_node": 2},
        "plan.other-environment",
    ),
}
"""Field of ``Env`` to what was planned, where it was open or other, what is found, and which rule then speaks."""


@pytest.mark.parametrize("field", CASES)
def test_a_fact_that_the_plan_did_not_have_is_held_against_its_rules(field: str) -> None:
    cfg, env, found, rule = CASES[field]
    plan, facts = planned(cfg, env)
    now = evolve(facts, env=evolve(env, **found))
    assert rule in [finding.rule for finding in planner.since(plan, now)]


@pytest.mark.parametrize("field", CASES)
def test_what_was_known_when_the_plan_was_made_is_not_said_again(field: str) -> None:
    cfg, env, _, rule = CASES[field]
    plan, facts = planned(cfg, env)
    assert planner.since(plan, facts) == ()
    assert planner.since(plan, evolve(facts, env=evolve(env, python="3.99"))) == ()
    assert rule not in [finding.rule for finding in (*plan.warnings, *plan.overridden)]


def test_every_field_of_the_environment_is_held_against_its_rules_or_by_drift() -> None:
    by_drift = {"world_size", "device"}
    read_by_no_rule = {"python"}
    assert {field.name for field in fields(Env)} == {*CASES, *by_drift, *read_by_no_rule}


def test_an_error_that_the_config_overrides_is_not_new() -> None:
    cfg, env, found, rule = CASES["torch"]
    plan, facts = planned(evolve(cfg, overrides=(rule,)), env)
    assert planner.since(plan, evolve(facts, env=evolve(env, **found))) == ()


def test_a_rule_that_the_plan_was_made_without_refuses_nothing_afterwards() -> None:
    facts = evolve(tiny_facts(), env=evolve(OPEN, torch="2.6.0"))
    plan = planner.plan(Config(engine=FSDP2()), facts, rules=()).unwrap()
    assert planner.since(plan, evolve(facts, env=evolve(facts.env, python="3.99"))) == ()
