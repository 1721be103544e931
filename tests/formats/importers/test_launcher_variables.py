"""What ``accelerate launch`` sets in the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from prepkit.config import BF16, DDP, FSDP2, CompileModel, Config, DeepSpeed, Single, WrapClasses
from prepkit.findings import PlanRejected
from prepkit.formats.importers.accelerate import read_variables

FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "WORLD_SIZE": "8",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
    "HOME": "/somewhere",
}


def test_fsdp_from_variables_names_them() -> None:
    imported = read_variables(FSDP)
    expected = Config(engine=FSDP2(wrap=WrapClasses(("Block",))), precision=BF16(reduce_dtype="bfloat16"))
    assert evolve(imported.config, origins=()) == expected
    assert imported.world_size == 8
    origins = {origin.setting: str(origin) for origin in imported.config.origins}
    assert origins["config.precision"] == "ACCELERATE_MIXED_PRECISION in environment"


@pytest.mark.parametrize(
    ("variables", "engine"),
    [
        ({}, Single()),
        ({"WORLD_SIZE": "4"}, DDP()),
        ({"WORLD_SIZE": "4", "FSDP_VERSION": "2"}, DDP()),  # set by some launcher, and switched off
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
            DeepSpeed(stage=3),
        ),
    ],
)
def test_switches_choose_the_engine(variables: dict[str, str], engine: object) -> None:
    assert read_variables(variables).config.engine == engine


def test_compile_from_variables() -> None:
    compiled = read_variables({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}).config.compile
    assert compiled == CompileModel(dynamic=False)


def test_a_wrong_value_is_told_under_the_name_of_its_variable() -> None:
    with pytest.raises(PlanRejected, match=r"environment ACCELERATE_MIXED_PRECISION: 'bf17' is none of"):
        read_variables({"ACCELERATE_MIXED_PRECISION": "bf17"})


def test_no_precision_beside_a_json_of_deepspeed_is_the_one_of_the_json(tmp_path: Path) -> None:
    """The launcher always sets the precision, and says in the list of fields whether the file did (DP-5, DP-34)."""
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}}')
    variables = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "zero.json"),
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file,zero3_init_flag",
    }
    assert read_variables(variables).config.precision == BF16(reduce_dtype="bfloat16")
    for said in ({"ACCELERATE_CONFIG_DS_FIELDS": "mixed_precision"}, {"ACCELERATE_MIXED_PRECISION": "fp16"}):
        with pytest.raises(PlanRejected, match="ACCELERATE_MIXED_PRECISION: accelerate refuses it"):
            read_variables(variables | said)
