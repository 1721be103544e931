"""Two settings of DeepSpeed's config at once, and batch sizes: laws that hold whatever they are."""

from __future__ import annotations

import json
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
from attrs import evolve
from returns.result import Success

from prepkit import planner
from prepkit.config import BF16, ClipNorm, Config, DeepSpeed
from prepkit.facts import Facts
from prepkit.findings import errors
from prepkit.plan import Plan
from prepkit.resolve.deepspeed.data import put
from prepkit.testing import tiny_facts, tiny_loader
from prepkit.testing.tiny import LIBRARIES
from tests.resolve.deepspeed.test_every_key import given
from tests.support.drawn_runs import JSON

SETTINGS = tuple((path, value) for path, values in JSON for value in values)
RUNS: dict[str, Config] = {
    "as stored, stage 2": Config(engine=DeepSpeed(stage=2)),
    "bf16, stage 3": Config(engine=DeepSpeed(stage=3), precision=BF16(), accumulation=2, clip=ClipNorm(1.0)),
}
WORLD = 4


def facts(**changes: Any) -> Facts:
    found = tiny_facts(world=WORLD, loader=tiny_loader())
    return evolve(found, env=evolve(found.env, libraries=LIBRARIES), **changes)


def outcome(cfg: Config, data: dict[str, Any], seen: Facts) -> Plan | frozenset[str]:
    """The plan, or the ids of the rules that refuse."""
    made = planner.plan(evolve(cfg, engine=evolve(cfg.engine, config=json.dumps(data))), seen)
    return made.unwrap() if isinstance(made, Success) else frozenset(one.rule for one in errors(made.failure()))


def section(path: str) -> str:
    return path.partition(".")[0]


@pytest.mark.parametrize("run", RUNS)
def test_settings_of_two_sections_reach_deepspeed_as_each_does_alone(run: str) -> None:
    cfg, together = RUNS[run], 0
    alone = {path: outcome(cfg, _with({}, path, value), facts()) for path, value in SETTINGS}
    usual = outcome(cfg, {}, facts())
    assert isinstance(usual, Plan)
    for (path, value), (other, second) in product(SETTINGS[::3], SETTINGS[1::3]):
        one, two = (outcome(cfg, _with({}, *pair), facts()) for pair in ((path, value), (other, second)))
        if section(path) == section(other) or not isinstance(one, Plan) or not isinstance(two, Plan):
            continue
        both = outcome(cfg, _with(_with({}, path, value), other, second), facts())
        if not isinstance(both, Plan):
            continue  # what two sections say together has rules of its own
        together += 1
        for name in (section(path), section(other)):
            before, source = given(usual).get(name), given(one if name == section(path) else two).get(name)
            if source != before:
                assert given(both).get(name) == source, (path, value, other, second)
    assert together > 20
    assert any(isinstance(found, Plan) for found in alone.values())


def _with(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    found = deepcopy(data)
    put(found, path, deepcopy(value))
    return found


def test_batch_sizes_that_have_a_plan_multiply_and_are_what_was_written() -> None:
    planned = 0
    said = (None, "auto", 0, 2, 30, 32)
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for whole, micro, steps in product(said, said, (None, "auto", 0, 2)):
        data = {name: value for name, value in zip(names, (whole, micro, steps), strict=True) if value is not None}
        for asked, accumulation, total in product((None, 2, -4), (None, 2), (None, 32)):
            cfg = Config(engine=DeepSpeed(stage=1, micro_batch=asked), accumulation=accumulation, global_batch=total)
            found = outcome(cfg, data, facts())
            if not isinstance(found, Plan):
                assert found, "a refusal names a rule"
                continue
            planned += 1
            batch, each, times = (given(found)[name] for name in names)
            assert batch == each * times * WORLD
            assert times == found.owners.accumulation_steps
            assert {name: value for name, value in data.items() if value != "auto"}.items() <= given(found).items()
            assert accumulation in (None, times)
            assert total in (None, batch)
            assert asked in (None, each)
    assert planned > 30
