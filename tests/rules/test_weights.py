"""Weights: what cannot be filled, renamings, and the words for what a checkpoint lacks."""

from __future__ import annotations

import pytest
from attrs import evolve

from prepkit.config import (
    DDP,
    FSDP2,
    XLA,
    BroadcastWeights,
    Config,
    DeepSpeed,
    Engine,
    InitWeights,
    LoadWeights,
    Single,
)
from prepkit.facts import Facts, ParamFact
from prepkit.facts.checkpoint import KeyMapping, WeightConverter
from prepkit.findings import Finding
from prepkit.rules import check
from prepkit.testing.tiny import PATH, tiny_checkpoint, tiny_facts, tiny_model
from tests.support.rule_findings import finding_of, rule_ids

LOAD = Config(weights=LoadWeights(PATH))


def of(rule: str, cfg: Config, facts: Facts) -> list[Finding]:
    return [finding for finding in check(cfg, facts) if finding.rule == rule]


@pytest.mark.parametrize(
    ("engine", "what"),
    [
        (Single(), "`BroadcastWeights` with Single, where there is no other rank to send to."),
        (DDP(), None),
        (FSDP2(), None),
        (DeepSpeed(stage=2, micro_batch=2), None),
        (DeepSpeed(stage=3, micro_batch=2), None),
        (XLA(), "`BroadcastWeights` with XLA, which takes the values that the model has."),
    ],
    ids=str,
)
def test_weights_are_sent_where_there_is_another_rank_and_an_engine_that_fills(
    engine: Engine, what: str | None
) -> None:
    facts = tiny_facts(world=1 if isinstance(engine, Single) else 2)
    found = of("weights.not-filled", Config(engine=engine, weights=BroadcastWeights()), facts)
    assert [finding.what for finding in found] == ([what] if what else [])
    assert {finding.where for finding in found} <= {"config.weights"}


@pytest.mark.parametrize(
    ("stage", "zero", "what"),
    [
        (3, {"offload_param": {"device": "nvme", "nvme_path": "/nvme"}}, "parameters on NVMe, where DeepSpeed writes"),
        (3, {"offload_param": {"device": "cpu"}}, ""),
        (3, {"zero_hpz_partition_size": 2}, "`zero_hpz_partition_size`, a second copy of the values that are there."),
        (3, {"zero_hpz_partition_size": 1}, ""),
        (3, {"zero_quantized_weights": True}, "`zero_quantized_weights`, which quantises the values that are there."),
        (3, {"zero_quantized_weights": False}, ""),
        (3, {"zero_quantized_nontrainable_weights": True}, "`zero_quantized_nontrainable_weights`, which quantises"),
        (2, {"zero_quantized_weights": True, "zero_hpz_partition_size": 2}, ""),
    ],
    ids=str,
)
def test_parts_that_deepspeed_makes_from_values_are_refused_without_them(
    stage: int, zero: dict[str, object], what: str
) -> None:
    engine = DeepSpeed(stage=stage, micro_batch=2, config={"zero_optimization": zero})
    facts = tiny_facts(world=2, device="cuda")
    found = of("weights.not-filled", Config(engine=engine, weights=InitWeights()), facts)
    assert [finding.what.startswith(f"`InitWeights` with {what}") for finding in found] == ([True] if what else [])
    assert not of("weights.not-filled", Config(engine=engine), facts)


def test_parameters_that_zero_init_has_divided_are_loaded_by_whoever_divided_them() -> None:
    model = tiny_model(extra=(ParamFact(name="norm.bias", shape=(4,), dtype="float32", cls="ZeroParameter"),))
    engine, facts = DeepSpeed(stage=3, micro_batch=2), tiny_facts(model, world=2, device="cuda")
    (found,) = of("weights.not-filled", Config(engine=engine, weights=InitWeights()), facts)
    assert found.what == "`InitWeights` for 1 parameter that zero.Init has divided already."
    assert found.where == "model.norm.bias"
    assert not of("weights.not-filled", Config(engine=engine), facts)


def test_layers_that_deepspeed_cuts_are_refused_without_values() -> None:
    engine = DeepSpeed(stage=1, micro_batch=2, config={"tensor_parallel": {"autotp_size": 2}})
    found = of("weights.not-filled", Config(engine=engine, weights=InitWeights()), tiny_facts(world=4, device="cuda"))
    assert [finding.fix for finding in found] == [
        "Remove `tensor_parallel`; or give the model its values, and leave config.weights out."
    ]


@pytest.mark.parametrize(("stateful", "fires"), [((), 0), (("norm.weight",), 1)])
def test_an_optimizer_without_state_loses_none_when_weights_are_sent(stateful: tuple[str, ...], fires: int) -> None:
    facts = tiny_facts(world=2, device="cuda")
    assert facts.optimizer is not None
    stepped = evolve(facts, optimizer=evolve(facts.optimizer, stateful=stateful))
    assert (
        rule_ids(Config(engine=FSDP2(), weights=BroadcastWeights()), stepped).count("weights.state-not-sent") == fires
    )
    assert "weights.state-not-sent" not in rule_ids(Config(engine=FSDP2(), weights=InitWeights()), stepped)


@pytest.mark.parametrize("rename", [(("(", ""),), (("^old[.]", r"\2"),)], ids=["pattern", "replacement"])
def test_a_renaming_that_is_no_regular_expression_is_named(rename: tuple[tuple[str, str], ...]) -> None:
    facts = tiny_facts()
    loaded = evolve(facts, checkpoint=tiny_checkpoint(facts.model))
    found = finding_of("weights.rename", Config(weights=LoadWeights(PATH, rename=rename)), loaded)
    assert found.where == "config.weights.rename"
    assert found.what.startswith(f"`{rename[0][0]}` and its replacement are no regular expression: ")


@pytest.mark.parametrize(
    ("stored", "wanted", "fires"),
    [
        *((stored, "float32", 0) for stored in ("float64", "float32", "float16", "bfloat16")),
        ("float32", "bfloat16", 0),
        ("int8", "float32", 1),
        ("float8_e4m3fn", "bfloat16", 1),
    ],
)
def test_floating_dtypes_are_cast_into_one_another_and_nothing_else(stored: str, wanted: str, fires: int) -> None:
    facts = tiny_facts(tiny_model(dtype=wanted))
    whole = tiny_checkpoint(facts.model)
    other = evolve(
        whole, tensors=tuple(evolve(tensor, dtype=stored) for tensor in whole.tensors[:1]) + whole.tensors[1:]
    )
    assert len(of("weights.dtype", LOAD, evolve(facts, checkpoint=other))) == fires


@pytest.mark.parametrize(
    ("converted", "says"),
    [
        (1, "converts `old.embed.weight` by Transpose, which"),
        (2, "converts `old.embed.weight` and 1 more tensor by Transpose, which"),
        (3, "converts `old.embed.weight` and 2 more tensors by Transpose, which"),
    ],
)
def test_tensors_that_only_their_library_can_convert_are_counted(converted: int, says: str) -> None:
    facts = tiny_facts()
    whole = tiny_checkpoint(facts.model)
    tensors = tuple(
        evolve(tensor, key=f"old.{tensor.key}", place=KeyMapping(name=tensor.key, recipe=0))
        if index < converted
        else tensor
        for index, tensor in enumerate(whole.tensors)
    )
    recipes = (WeightConverter(sources=("*",), others=("Transpose",)),)
    found = finding_of(
        "weights.missing-keys", LOAD, evolve(facts, checkpoint=evolve(whole, tensors=tensors, recipes=recipes))
    )
    assert says in found.what
