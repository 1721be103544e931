"""LLaMA-Factory's YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepkit.config import (
    BF16,
    DDP,
    FP8,
    MSAMP,
    CheckpointBlocks,
    DeepSpeed,
    TorchAO,
    TransformerEngine,
)
from prepkit.findings import PlanRejected
from prepkit.formats.importers import Imported, import_config

TOP = "model_name_or_path: some/model\nstage: sft\nfinetuning_type: full\n"


def read(tmp_path: Path, text: str) -> Imported:
    (tmp_path / "sft.yaml").write_text(TOP + text)
    return import_config(tmp_path / "sft.yaml")


def test_the_usual_file_is_told_by_its_keys_and_recomputes_blocks(tmp_path: Path) -> None:
    text = "bf16: true\ngradient_accumulation_steps: 8\ndataset: identity\ncutoff_len: 2048\nddp_timeout: 60\n"
    imported = read(tmp_path, text)
    config = imported.config
    assert (imported.kind, config.engine, config.precision) == ("llamafactory", DDP(), BF16())
    assert (config.accumulation, config.timeout_s, config.checkpointing) == (8, 60.0, CheckpointBlocks())
    listed = {origin.key for origin in imported.not_preparation}
    assert listed == {"model_name_or_path", "stage", "finetuning_type", "dataset", "cutoff_len"}


def test_recomputation_is_off_where_the_file_says_so(tmp_path: Path) -> None:
    config = read(tmp_path, "disable_gradient_checkpointing: true\n").config
    assert config.checkpointing is None
    assert [(origin.setting, origin.line) for origin in config.origins] == [("config.checkpointing", 4)]


def test_pure_bf16_has_no_master_weights(tmp_path: Path) -> None:
    assert read(tmp_path, "pure_bf16: true\n").config.precision == BF16(master_weights=False)


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("fp8_backend: te", TransformerEngine()),
        ("fp8_backend: msamp", MSAMP()),
        ("fp8_backend: torchao\nfp8_enable_fsdp_float8_all_gather: true", TorchAO(float8_all_gather=True)),
    ],
)
def test_float8_and_its_library(tmp_path: Path, text: str, backend: object) -> None:
    imported = read(tmp_path, f"fp8: true\nbf16: true\n{text}\n")
    assert (imported.config.precision, imported.notes) == (FP8(backend=backend), ())  # type: ignore[arg-type]


def test_a_deepspeed_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "ds_z3.json").write_text('{"zero_optimization": {"stage": 3}}')
    assert isinstance(read(tmp_path, "deepspeed: ds_z3.json\n").config.engine, DeepSpeed)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pure_bf16: true\nfp16: true", "a run has one precision"),
        ("disable_gradient_checkpointing: true\ngradient_checkpointing: true", "is true as well"),
        ("use_mca: true", "Megatron-Core replaces model"),
        ("pure_bf61: true", "sft.yaml:4:1 pure_bf61: llamafactory knows no such key"),
    ],
)
def test_contradictions_slips_and_what_is_not_offered_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(PlanRejected, match=said):
        read(tmp_path, f"{text}\n")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("use_unsloth_gc: true", "not-supported"),
        ("use_unsloth: true", "not-supported"),
        ("fp8_backend: te", "no-effect"),
        ("fp8: true", "asks-machine"),
    ],
)
def test_what_is_not_done_the_same_way_is_said(tmp_path: Path, text: str, rule: str) -> None:
    assert [note.rule for note in read(tmp_path, f"{text}\n").notes] == [f"import.{rule}"]
