"""Variables that accelerate's launcher leaves behind: warned of where the config says otherwise, and only there."""

from __future__ import annotations

import pytest

from prepkit.config import (
    BF16,
    DDP,
    FP8,
    FP16,
    FSDP1,
    FSDP2,
    XLA,
    CompileBlocks,
    CompileModel,
    Config,
    DeepSpeed,
    Mesh,
    OffloadToCPU,
)
from prepkit.facts import Env
from prepkit.findings import Severity
from prepkit.rules.launcher_flags import FLAGS
from tests.support.rule_findings import finding_of, rule_ids_in, tiny_facts

RULE = "environment.launcher-flag"
PARALLEL = (("ACCELERATE_USE_PARALLELISM_CONFIG", "true"),)
HSDP = (("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2"), ("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2"))

CASES = [
    ("ACCELERATE_USE_FSDP", "True", Config(engine=DDP()), Config(engine=FSDP2())),
    ("ACCELERATE_USE_FSDP", "1", Config(engine=DeepSpeed()), Config(engine=FSDP1())),
    ("ACCELERATE_USE_FSDP", "t", Config(engine=DDP()), Config(engine=FSDP2())),
    ("ACCELERATE_USE_FSDP", "y", Config(engine=DDP()), Config(engine=FSDP2())),
    ("ACCELERATE_USE_FSDP", "on", Config(engine=DDP()), Config(engine=FSDP2())),
    ("ACCELERATE_USE_DEEPSPEED", "1", Config(engine=FSDP2()), Config(engine=DeepSpeed())),
    ("FSDP_VERSION", "2", Config(engine=FSDP1()), Config(engine=FSDP2())),
    ("ACCELERATE_MIXED_PRECISION", "bf16", Config(engine=DDP()), Config(engine=DDP(), precision=BF16())),
    ("ACCELERATE_MIXED_PRECISION", "fp8", Config(engine=DDP()), Config(engine=DDP(), precision=FP8())),
    ("ACCELERATE_MIXED_PRECISION", "FP16", Config(engine=DDP()), Config(engine=DDP(), precision=FP16())),
    ("ACCELERATE_USE_CPU", "yes", Config(engine=DDP()), Config(engine=DDP(), device="cpu")),
    ("ACCELERATE_TORCH_DEVICE", "xpu", Config(engine=DDP()), None),
    ("ACCELERATE_TORCH_DEVICE", "cuda:1", Config(engine=DDP()), None),
    ("ACCELERATE_TORCH_DEVICE", "cpu:0", Config(engine=DDP()), Config(engine=DDP(), device="cpu")),
    ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", Config(engine=DDP()), Config(engine=DDP(), compile=CompileModel())),
    (
        "ACCELERATE_DYNAMO_BACKEND",
        "EAGER",
        Config(engine=DDP(), compile=CompileBlocks()),
        Config(engine=DDP(), compile=CompileModel(backend="eager")),
    ),
    (
        "ACCELERATE_DYNAMO_MODE",
        "max-autotune",
        Config(engine=DDP(), compile=CompileModel()),
        Config(engine=DDP(), compile=CompileModel(mode="max-autotune")),
    ),
    (
        "FSDP_OFFLOAD_PARAMS",
        "true",
        Config(engine=FSDP2()),
        Config(engine=FSDP2(offload=OffloadToCPU())),
    ),
    ("FSDP_OFFLOAD_PARAMS", "true", Config(engine=FSDP1()), Config(engine=FSDP1(offload=True))),
    ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", Config(engine=DDP()), Config(engine=DDP(), accumulation=4)),
    ("ACCELERATE_DOWNCAST_BF16", "1", Config(engine=XLA()), Config(engine=DDP())),
    ("ACCELERATE_USE_MEGATRON_LM", "true", Config(engine=DDP()), None),
]


@pytest.mark.parametrize(("name", "value", "contradicted", "agreed"), CASES)
def test_a_flag_is_a_warning_where_the_config_says_otherwise_and_silent_where_it_agrees(
    name: str, value: str, contradicted: Config, agreed: Config | None
) -> None:
    assert RULE in rule_ids_in(contradicted, variables=((name, value),))
    if agreed is not None:
        assert RULE not in rule_ids_in(agreed, variables=((name, value),))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ACCELERATE_MIXED_PRECISION", "no"),
        ("ACCELERATE_DYNAMO_BACKEND", "no"),
        ("ACCELERATE_DYNAMO_BACKEND", ""),
        ("ACCELERATE_MIXED_PRECISION", ""),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1"),
        ("ACCELERATE_USE_FSDP", "false"),
        ("ACCELERATE_USE_CPU", "false"),
        ("FSDP_OFFLOAD_PARAMS", "false"),
        ("FSDP_VERSION", "1"),
    ],
)
def test_what_the_launcher_writes_when_nobody_asked_says_nothing(name: str, value: str) -> None:
    cfg = Config(engine=DDP(), precision=BF16(), compile=CompileModel(), accumulation=4)
    assert RULE not in rule_ids_in(cfg, variables=((name, value),))


def test_a_mesh_that_the_launcher_laid_out_otherwise_is_named_by_its_axes() -> None:
    variables = (*PARALLEL, *HSDP)
    assert RULE not in rule_ids_in(Config(engine=FSDP2(), mesh=Mesh(replicate=2, shard=2)), variables=variables)
    facts = tiny_facts(world=4, device="cuda", variables=variables)
    found = finding_of(RULE, Config(engine=FSDP2()), facts)
    assert found.severity is Severity.WARNING
    assert found.what.endswith("DP_REPLICATE_SIZE=2 where the plan has 1, DP_SHARD_SIZE=2 where the plan has 4.")
    cut = (*PARALLEL, ("PARALLELISM_CONFIG_CP_SIZE", "2"), ("PARALLELISM_CONFIG_DP_SHARD_SIZE", "4"))
    assert (
        "CP_SIZE=2 where the plan has 1"
        in finding_of(RULE, Config(engine=FSDP2()), tiny_facts(world=4, device="cuda", variables=cut)).what
    )


def test_every_flag_of_the_table_is_tried_here() -> None:
    assert {name for name, *_ in CASES} | {"ACCELERATE_USE_PARALLELISM_CONFIG"} == set(FLAGS)
    assert Env().variables == ()


def test_version_1_is_what_fsdp1_is() -> None:
    variables = (("FSDP_VERSION", "1"),)
    assert RULE not in rule_ids_in(Config(engine=FSDP1()), variables=variables)
