"""Precisions: where bfloat16 and float16 compute, and the loss scale."""

from __future__ import annotations

import pytest
from attrs import evolve

from prepkit.config import BF16, DDP, FP16, XLA, Config, Intent
from prepkit.testing.tiny import tiny_facts, tiny_model
from tests.support.rule_findings import finding_of, rule_ids, rule_ids_in


@pytest.mark.parametrize(
    ("env", "device", "fires"),
    [
        ({"capability": (7, 5)}, None, 1),
        ({"capability": (7, 5), "bf16": True}, None, 1),
        ({"capability": (7, 5)}, "cpu", 0),
        ({"capability": (8, 0)}, None, 0),
        ({"bf16": False}, None, 1),
        ({}, None, 0),
    ],
)
def test_bfloat16_is_refused_where_the_device_does_not_compute_in_it(
    env: dict[str, object], device: str | None, fires: int
) -> None:
    assert (
        rule_ids_in(Config(engine=DDP(), precision=BF16(), device=device), **env)
        == ["precision.bf16-unsupported"] * fires
    )


def test_bfloat16_on_xla_is_no_matter_of_the_gpu_beside_it() -> None:
    rules = rule_ids_in(Config(engine=XLA(), precision=BF16()), capability=(7, 5), libraries=(("torch_xla", "2.9.0"),))
    assert rules == []


@pytest.mark.parametrize(
    ("device", "asked", "fires"),
    [
        *((device, None, 1) for device in ("cpu", "neuron")),
        *((device, None, 0) for device in ("cuda", "xpu", "npu", "hpu", "mlu", "musa", "sdaa", "mps")),
        ("cuda", "cpu", 1),
    ],
)
def test_float16_is_refused_where_no_loss_is_scaled(device: str, asked: str | None, fires: int) -> None:
    rules = rule_ids_in(Config(precision=FP16(), device=asked), device=device, world_size=1)
    assert rules == ["precision.fp16-unsupported"] * fires


def test_float16_weights_need_float32_masters_under_float16_only() -> None:
    facts = tiny_facts(tiny_model(dtype="float16"), device="cuda")
    assert rule_ids(Config(precision=FP16()), facts) == []
    rules = rule_ids(Config(precision=FP16(master_weights=False)), facts)
    assert rules == ["precision.fp16-trains-fp16", "precision.no-master-weights"]
    assert (
        rule_ids(Config(precision=FP16(master_weights=False), intent=Intent.INFERENCE), evolve(facts, optimizer=None))
        == []
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"init_scale": 0.0},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"backoff_factor": 0.0},
        {"growth_interval": 0},
    ],
    ids=str,
)
def test_a_loss_scale_that_torch_refuses_or_that_never_moves_is_refused(wrong: dict[str, float]) -> None:
    facts = tiny_facts(device="cuda")
    finding = finding_of("precision.loss-scale", Config(precision=FP16(**wrong)), facts)  # type: ignore[arg-type]
    assert finding.where == f"config.precision.{next(iter(wrong))}"


@pytest.mark.parametrize("precision", [None, FP16()], ids=str)
def test_a_device_without_bfloat16_computes_in_other_dtypes(precision: FP16 | None) -> None:
    assert rule_ids_in(Config(engine=DDP(), precision=precision), capability=(7, 5), bf16=False) == []


def test_a_model_in_16_bits_is_warned_of_only_where_it_is_trained() -> None:
    facts = tiny_facts(tiny_model(dtype="bfloat16"), optimizer=False)
    assert rule_ids(Config(intent=Intent.INFERENCE), facts) == []
    assert "precision.steps-in-16-bit" in rule_ids(Config(), facts)
