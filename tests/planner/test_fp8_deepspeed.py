"""Float8 under DeepSpeed as plans and findings: who converts, whose ``initialize``, and what MS-AMP cannot do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attrs import evolve

from prepkit.config import FP8, MSAMP, ClipNorm, Config, DeepSpeed, TorchAO, TransformerEngine
from prepkit.facts import Facts
from prepkit.plan import Plan
from prepkit.planner import plan
from prepkit.rules import check
from prepkit.steps import InitializeDeepSpeed
from prepkit.testing import tiny_facts, tiny_model
from prepkit.testing.tiny import LIBRARIES

AMP, TE, AO = FP8(backend=MSAMP()), FP8(backend=TransformerEngine()), FP8(backend=TorchAO())
SECTION = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def facts(**changes: Any) -> Facts:
    made = tiny_facts(tiny_model(width=16, vocab=16), world=2, device="cuda")
    return evolve(made, env=evolve(made.env, libraries=LIBRARIES, capability=(9, 0)), **changes)


def asked(precision: FP8, stage: int = 2, json: dict[str, Any] | None = None, **engine: Any) -> Config:
    return Config(engine=DeepSpeed(stage=stage, micro_batch=4, config=json or {}, **engine), precision=precision)


def initialised(made: Plan) -> InitializeDeepSpeed:
    (step,) = (one.step for one in made.steps if isinstance(one.step, InitializeDeepSpeed))
    return step


def told(cfg: Config, seen: Facts) -> dict[str, str]:
    return {finding.rule: f"{finding.what} {finding.fix}" for finding in check(cfg, seen)}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ms_amp_gets_a_section_of_its_own_and_its_own_initialize(stage: int) -> None:
    step = initialised(plan(asked(AMP, stage), facts()).unwrap())
    said = {".".join(one.path): json.loads(one.value) for one in step.settings}
    assert step.library == "msamp"
    assert (said["msamp.enabled"], said["msamp.opt_level"], said["bf16.enabled"]) == (True, "O2", True)


def test_other_precisions_know_no_such_section() -> None:
    found = told(asked(AO, json={"msamp": {"enabled": True}}), facts())
    assert found["deepspeed.unknown-key"].startswith("DeepSpeed knows no `msamp`")
    assert found["deepspeed.unknown-key"].endswith("write precision=FP8(backend=MSAMP()), which adds it.")
    assert initialised(plan(asked(AO), facts()).unwrap()).library == "deepspeed"


def test_a_section_that_says_otherwise_is_a_disagreement() -> None:
    found = told(asked(AMP, json={"msamp": {"opt_level": "O1"}}), facts())
    assert "`msamp.opt_level` is O1 in config.engine.config" in found["deepspeed.two-places"]
    assert "deepspeed.unknown-key" not in found
    assert plan(asked(AMP, json={"msamp": {"use_te": True, "opt_level": "auto"}}), facts()).unwrap()


def test_a_misspelt_key_of_the_section_is_named() -> None:
    found = told(asked(AMP, json={"msamp": {"opt_levle": "O1"}}), facts())
    assert "`msamp.opt_levle`" in found["deepspeed.unknown-key"]
    assert "Write 'msamp.opt_level'" in found["deepspeed.unknown-key"]


def test_ms_amp_shards_no_parameters_and_offloads_nothing() -> None:
    assert "cannot shard parameters" in told(asked(AMP, 3), facts())["deepspeed.msamp"]
    assert "offloaded to cpu" in told(asked(AMP, offload_optimizer="cpu"), facts())["deepspeed.msamp"]
    assert "deepspeed.msamp" not in told(asked(AO, 3), facts())


@pytest.mark.parametrize("precision", [AMP, TE], ids=["msamp", "te"])
def test_an_optimizer_that_deepspeed_makes_is_made_over_the_new_layers(precision: FP8) -> None:
    made = plan(asked(precision, json=SECTION), facts(optimizer=None)).unwrap()
    assert initialised(made).optimizer == "section"
    assert "RebindOptimizer" not in [type(one.step).__name__ for one in made.steps]
    alone = told(asked(precision, 0), facts(optimizer=None))
    assert {"fp8.msamp-optimizer", "fp8.optimizer-missing"} & set(alone)


def test_deepspeed_clips_what_ms_amp_makes() -> None:
    cfg = evolve(asked(AMP), clip=ClipNorm(1.0))
    assert "fp8.msamp-clip" not in told(cfg, facts())
    assert "fp8.msamp-clip" in told(evolve(cfg, engine=Config().engine), facts())
