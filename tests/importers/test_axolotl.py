"""axolotl's YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepkit.config import BF16, FSDP2, CheckpointBlocks, DeepSpeed, Mesh, WrapClasses
from prepkit.findings import PlanRejected
from prepkit.importers import Imported, import_config


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
    with pytest.raises(PlanRejected, match="prepkit cuts no sequences over ranks"):
        read(tmp_path, "context_parallel_size: 2\n")
