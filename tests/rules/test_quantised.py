"""Models with 4-bit or 8-bit weights: where they have to lie."""

from __future__ import annotations

import pytest
from attrs import evolve

from prepkit.config import DDP, Config
from prepkit.facts import Env, Facts, ParamFact
from prepkit.rules import check
from prepkit.testing.tiny import tiny_facts, tiny_model
from tests.support.rule_findings import rule_ids


def packed(*devices: str, bitsandbytes: str = "0.50.2", world: int = 1, device: str = "cuda") -> Facts:
    device_map = tuple((f"layers.{index}", held) for index, held in enumerate(devices))
    model = evolve(tiny_model(), quantised="8bit", device_map=device_map)
    env = Env(world_size=world, device=device, libraries=(("bitsandbytes", bitsandbytes),))
    return evolve(tiny_facts(model), env=env)


@pytest.mark.parametrize(
    ("facts", "rules"),
    [
        (packed(), []),
        (packed("cuda:local", "cuda:local"), []),
        (packed("cuda:local"), []),
        (packed("local"), []),
        (packed("xpu:local"), ["quantised.other-device"]),
        (packed("cuda:1"), ["quantised.other-device"]),
        (packed("cuda:0", "cuda:1"), []),  # one process may be a pipeline
        (packed("disk"), ["quantised.on-disk"]),
        (packed("cuda:0", "disk"), ["quantised.on-disk"]),
        (packed("cpu"), ["quantised.on-cpu"]),
        (packed("cpu", device="cpu"), []),
        (packed("cpu", device="cpu", bitsandbytes="0.46.0"), []),
        (packed("cpu", device="cpu", bitsandbytes="0.45.0"), ["quantised.on-cpu"]),
        (packed("cuda:0", "cpu"), []),
        (packed("cuda:0", "cpu", bitsandbytes="0.43.3"), ["quantised.on-cpu"]),
        (packed("xpu:0", "cpu", device="xpu"), ["quantised.on-cpu"]),
        (packed("cuda:local", device="cpu"), ["quantised.other-device"]),
        (packed("cuda:0", device="cpu"), ["quantised.other-device"]),
    ],
    ids=str,
)
def test_packed_weights_lie_where_they_are_computed_with(facts: Facts, rules: list[str]) -> None:
    found = check(Config(), facts)
    assert [finding.rule for finding in found] == rules
    assert {finding.where for finding in found} <= {"model.hf_device_map"}


def test_a_packed_model_on_several_devices_is_refused_in_several_processes_also_when_the_map_is_kept() -> None:
    facts = packed("cuda:0", "cuda:1", world=2)
    assert rule_ids(Config(engine=DDP()), facts) == ["model.device-map"]
    assert rule_ids(Config(engine=DDP(), keep_device_map=True), facts) == ["quantised.spread"]
    assert rule_ids(Config(engine=DDP()), packed("cuda:local", world=2)) == []


def test_an_environment_that_does_not_name_bitsandbytes_is_trusted() -> None:
    facts = packed("cpu", device="cpu")
    assert rule_ids(Config(), evolve(facts, env=evolve(facts.env, libraries=()))) == []


@pytest.mark.parametrize(
    ("param", "fires"),
    [
        (ParamFact(name="head.w", shape=(64, 64), dtype="float32", requires_grad=False, cls="Params4bit"), 1),
        (ParamFact(name="head.w", shape=(2048, 1), dtype="uint8", requires_grad=False, cls="Params4bit"), 0),
        (ParamFact(name="head.w", shape=(1024, 1), dtype="bfloat16", requires_grad=False, cls="Params4bit"), 0),
        (ParamFact(name="head.w", shape=(64, 64), dtype="float16", requires_grad=False, cls="Int8Params"), 1),
        (ParamFact(name="head.w", shape=(64, 64), dtype="int8", requires_grad=False, cls="Int8Params"), 0),
        (ParamFact(name="head.w", shape=(64, 64), dtype="float32", cls="Int8Params"), 0),  # has_fp16_weights
    ],
)
def test_weights_that_are_not_packed_yet_are_refused(param: ParamFact, fires: int) -> None:
    assert rule_ids(Config(), tiny_facts(tiny_model(extra=(param,)))) == ["quantised.not-packed"] * fires
