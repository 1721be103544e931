"""axolotl's YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepkit.config import (
    BF16,
    FP8,
    FSDP2,
    CheckpointBlocks,
    CompileModel,
    DeepSpeed,
    Mesh,
    OffloadToCPU,
    TorchAO,
    WrapClasses,
)
from prepkit.findings import PlanRejected
from prepkit.formats.importers import Imported, import_config


def read(tmp_path: Path, text: str) -> Imported:
    (tmp_path / "axolotl.yml").write_text(f"base_model: some/model\n{text}")
    return import_config(tmp_path / "axolotl.yml")


def test_fsdp_with_its_own_names_and_sizes(tmp_path: Path) -> None:
    text = """\
bf16: auto
gradient_checkpointing: true
gradient_accumulation_steps: 2
micro_batch_size: 4
fsdp_version: 2
fsdp_config:
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
  reshard_after_forward: false
dp_replicate_size: 2
dp_shard_size: 4
"""
    imported = read(tmp_path, text)
    config = imported.config
    assert imported.kind == "axolotl"
    assert config.engine == FSDP2(wrap=WrapClasses(("LlamaDecoderLayer",)), reshard_after_forward=False)
    assert (config.mesh, config.accumulation) == (Mesh(replicate=2, shard=4), 2)
    assert (config.precision, config.checkpointing) == (BF16(reduce_dtype="bfloat16"), CheckpointBlocks())
    assert {origin.key for origin in imported.not_preparation} == {"base_model", "micro_batch_size"}
    assert [note.where.rpartition(" ")[2] for note in imported.notes] == ["bf16"]


def test_full_bf16_has_no_master_weights(tmp_path: Path) -> None:
    assert read(tmp_path, "bf16: full\n").config.precision == BF16(master_weights=False)


def test_a_deepspeed_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "zero1.json").write_text('{"zero_optimization": {"stage": 1}}')
    assert isinstance(read(tmp_path, "deepspeed: zero1.json\n").config.engine, DeepSpeed)


@pytest.mark.parametrize("word", ["offload", "unsloth", "offload_disk"])
def test_checkpoints_that_wait_in_host_memory_do_so_here(tmp_path: Path, word: str) -> None:
    imported = read(tmp_path, f"gradient_checkpointing: {word}\n")
    assert imported.config.checkpointing == CheckpointBlocks(offload=True)
    assert ["not on a disk" in note.what for note in imported.notes] == [True] * (word == "offload_disk")


def test_what_is_not_done_the_same_way_is_said(tmp_path: Path) -> None:
    text = "context_parallel_size: 2\nsequence_parallel_degree: 4\nexpert_parallel_size: 2\nfloat16: true\n"
    with pytest.raises(PlanRejected) as refused:
        read(tmp_path, text)
    assert {(found.rule, found.where.rpartition(" ")[2]) for found in refused.value.findings} == {
        ("import.not-supported", line.partition(":")[0]) for line in text.splitlines()
    }


def test_float8_and_weights_of_bfloat16(tmp_path: Path) -> None:
    text = "bf16: true\nfp8: true\nfp8_enable_fsdp_float8_all_gather: true\ntorch_compile: auto\n"
    config = read(tmp_path, text).config
    assert config.precision == FP8(backend=TorchAO(float8_all_gather=True), reduce_dtype="float32")
    assert config.compile == CompileModel()
    assert read(tmp_path, "bfloat16: true\n").config.precision == BF16(master_weights=False)


@pytest.mark.parametrize("word", ["true", "legacy", "disk"])
def test_offloaded_activations_are_those_of_recomputed_blocks(tmp_path: Path, word: str) -> None:
    imported = read(tmp_path, f"gradient_checkpointing: true\nactivation_offloading: {word}\n")
    assert imported.config.checkpointing == CheckpointBlocks(offload=True)
    assert ["not on a disk" in note.what for note in imported.notes] == [True] * (word == "disk")
    assert "activation_offloading" in {origin.key for origin in imported.config.origins}
    with pytest.raises(PlanRejected, match="axolotl refuses it without gradient_checkpointing"):
        read(tmp_path, f"activation_offloading: {word}\n")


def test_micro_batches_of_the_batch_of_a_rank(tmp_path: Path) -> None:
    assert read(tmp_path, "batch_size: 8\nmicro_batch_size: 2\n").config.accumulation == 4
    with pytest.raises(PlanRejected, match="and not both"):
        read(tmp_path, "batch_size: 8\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\n")


def test_pinned_memory_and_the_type_of_the_last_state_dict(tmp_path: Path) -> None:
    text = """\
fsdp_config:
  version: 2
  offload_params: true
  cpu_offload_pin_memory: false
  final_state_dict_type: FULL_STATE_DICT
"""
    imported = read(tmp_path, text)
    assert imported.config.engine == FSDP2(offload=OffloadToCPU(pin_memory=False))
    assert "fsdp_config.final_state_dict_type" in {origin.key for origin in imported.not_preparation}


def test_the_micro_batch_fills_in_deepspeeds_file(tmp_path: Path) -> None:
    (tmp_path / "zero1.json").write_text('{"zero_optimization": {"stage": 1}}')
    engine = read(tmp_path, "deepspeed: zero1.json\nmicro_batch_size: 3\n").config.engine
    assert isinstance(engine, DeepSpeed)
    assert engine.micro_batch == 3
