"""Units of FSDP2: dtypes, frozen parameters."""

from __future__ import annotations

import pytest
from attrs import evolve

from prepkit.config import BF16, DDP, FSDP1, FSDP2, Config, DeepSpeed, WrapBlocks, WrapRoot
from prepkit.facts import ParamFact
from prepkit.testing.tiny import tiny_facts, tiny_model
from tests.support.rule_findings import finding_of, fsdp2_with, rule_ids


def test_master_weights_make_the_dtypes_of_a_unit_uniform() -> None:
    model = tiny_model(extra=(ParamFact(name="layers.0.attn.lora", shape=(4,), dtype="bfloat16"),))
    cfg, facts = fsdp2_with(WrapBlocks(), model)
    assert "units.mixed-dtypes" in rule_ids(cfg, facts)
    assert rule_ids(evolve(cfg, precision=BF16()), facts) == []
    assert "units.mixed-dtypes" in rule_ids(evolve(cfg, precision=BF16(master_weights=False)), facts)


def test_complex_parameters_are_not_told_to_be_cast() -> None:
    """A cast to float32 would drop the imaginary part."""
    model = tiny_model(extra=(ParamFact(name="layers.0.attn.by", shape=(4,), dtype="complex64"),))
    fix = finding_of("units.mixed-dtypes", *fsdp2_with(WrapBlocks(), model)).fix
    assert "torch.view_as_real" in fix
    assert "DDP()" in fix
    assert "Cast" not in fix


def test_frozen_parameters_may_have_a_dtype_of_their_own() -> None:
    lora = ParamFact(name="layers.0.attn.lora", shape=(4,), dtype="bfloat16", requires_grad=False)
    assert rule_ids(*fsdp2_with(WrapBlocks(), tiny_model(extra=(lora,)))) == ["units.mixed-requires-grad"]


def test_dtypes_that_differ_between_units_only_are_in_order() -> None:
    facts = tiny_facts(world=2)
    params = (evolve(p, dtype="float64") if p.name.startswith("layers.1.") else p for p in facts.model.params)
    cfg = Config(engine=FSDP2())
    mixed = evolve(facts, model=evolve(facts.model, params=tuple(params)))
    assert rule_ids(cfg, mixed) == []
    assert rule_ids(evolve(cfg, engine=FSDP2(wrap=WrapRoot())), mixed) == ["blocks.one-unit", "units.mixed-dtypes"]


def test_units_that_mix_frozen_and_trained_parameters_are_counted_in_one_warning() -> None:
    model = tiny_model(frozen=("layers.0.attn.weight", "layers.1.attn.weight", "embed.weight"))
    finding = finding_of("units.mixed-requires-grad", Config(engine=FSDP2()), tiny_facts(model, world=2))
    assert finding.what.startswith("3 of 3 units mix frozen and trained parameters (`model")
    assert rule_ids(Config(engine=DDP()), tiny_facts(model, world=2)) == []
    whole = tiny_model(frozen=("layers.0.attn.weight", "layers.0.mlp.weight"))
    assert rule_ids(Config(engine=FSDP2()), tiny_facts(whole, world=2)) == []


def test_a_frozen_base_in_bfloat16_beside_adapters_in_float32_needs_torch_2_8() -> None:
    base = tuple(param.name for param in tiny_model().params)
    adapter = ParamFact(name="layers.0.attn.lora", shape=(4,), dtype="float32")
    cfg, facts = fsdp2_with(WrapBlocks(), tiny_model(dtype="bfloat16", frozen=base, extra=(adapter,)))
    for torch, refused in (("2.6.0", True), ("2.7.1", True), ("2.8.0", False), ("2.13.0+cpu", False)):
        known = evolve(facts, env=evolve(facts.env, torch=torch, device="cuda"))
        for precision in (None, BF16()):
            assert ("units.mixed-dtypes" in rule_ids(evolve(cfg, precision=precision), known)) is refused
    old = evolve(facts, env=evolve(facts.env, torch="2.7.1", device="cuda"))
    finding = finding_of("units.mixed-dtypes", cfg, old)
    assert "The unit holds parameters of several dtypes" in finding.what
    assert "torch>=2.8" in finding.fix


def test_single_numbers_and_ignored_modules_are_left_out_of_what_a_unit_must_agree_in() -> None:
    scale = ParamFact(name="norm.scale", shape=(), dtype="bfloat16")
    facts = tiny_facts(tiny_model(extra=(scale,)), world=2)
    low = "precision.steps-in-16-bit"
    assert rule_ids(Config(engine=FSDP2()), facts) == [low]
    assert "units.scalar" in rule_ids(Config(engine=FSDP1()), facts)
    assert "deepspeed.scalar" in rule_ids(Config(engine=DeepSpeed(stage=3, micro_batch=2)), facts)
    odd = tiny_facts(tiny_model(extra=(evolve(scale, name="head.scale", shape=(4,)),)), world=2)
    assert rule_ids(Config(engine=FSDP2()), odd) == ["units.mixed-dtypes", low]
    assert rule_ids(Config(engine=FSDP2(ignored=("head",))), odd) == [low]


def test_frozen_parameters_of_other_units_do_not_change_how_mixed_dtypes_are_mended() -> None:
    lora = ParamFact(name="layers.0.attn.lora", shape=(4,), dtype="bfloat16")
    cfg, facts = fsdp2_with(WrapBlocks(), tiny_model(extra=(lora,), frozen=("layers.1.attn.weight",)))
    old = evolve(facts, env=evolve(facts.env, torch="2.7.1", device="cuda"))
    assert finding_of("units.mixed-dtypes", cfg, old).fix.startswith("Write precision=BF16(), ")


@pytest.mark.parametrize(
    ("trained", "ignored", "fires"), [(True, (), 1), (False, (), 0), (True, ("norm",), 0), (False, ("norm",), 0)]
)
def test_an_empty_parameter_is_refused_where_its_gradient_would_be_reduced(
    trained: bool, ignored: tuple[str, ...], fires: int
) -> None:
    empty = ParamFact(name="norm.none", shape=(0, 4), dtype="float32", requires_grad=trained)
    rules = rule_ids(Config(engine=FSDP2(ignored=ignored)), tiny_facts(tiny_model(extra=(empty,)), world=2))
    assert rules.count("units.empty") == fires


@pytest.mark.parametrize(("ignored", "fires"), [((), 1), (("norm",), 0)])
def test_a_single_number_that_is_ignored_is_not_flattened(ignored: tuple[str, ...], fires: int) -> None:
    scale = ParamFact(name="norm.scale", shape=(), dtype="float32")
    rules = rule_ids(Config(engine=FSDP1(ignored=ignored)), tiny_facts(tiny_model(extra=(scale,)), world=2))
    assert rules.count("units.scalar") == fires
