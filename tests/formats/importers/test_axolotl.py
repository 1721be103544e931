"""axolotl's YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepkit.config import (
    BF16,
    FP8,
    FSDP1,
    FSDP2,
    CheckpointBlocks,
    CompileModel,
    DeepSpeed,
    Mesh,
    OffloadToCPU,
    TorchAO,
    WrapBlocks,
    WrapClasses,
)
from prepkit.findings import PlanRejected
from prepkit.formats.importers import Imported, import_config
from tests.support.command_line import run


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


OLD = """\
bf16: true
fsdp: [full_shard, auto_wrap]
fsdp_config:
  fsdp_limit_all_gathers: true
  fsdp_sync_module_states: true
  fsdp_offload_params: true
  fsdp_use_orig_params: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_sharding_strategy: FULL_SHARD
"""


def test_fsdp_without_a_version_is_of_version_1_and_all_that_it_reads_stays(tmp_path: Path) -> None:
    imported = read(tmp_path, OLD)
    expected = FSDP1(
        wrap=WrapBlocks(),
        offload=True,
        use_orig_params=False,
        sync_module_states=True,
        backward_prefetch="NO_PREFETCH",
        buffer_dtype="bfloat16",
    )
    assert imported.config.engine == expected
    assert not imported.notes
    run("check", "--fix", str(tmp_path / "axolotl.yml"))
    assert (tmp_path / "axolotl.yml").read_text() == f"base_model: some/model\n{OLD}"
    assert read(tmp_path, "fsdp_config: {offload_params: true}\nfsdp_version: 2\n").config.engine == FSDP2(
        wrap=WrapBlocks(), offload=OffloadToCPU()
    )


def test_what_axolotl_does_not_hand_on_to_version_1_is_said_where_it_would_change_the_run(tmp_path: Path) -> None:
    imported = read(tmp_path, "fsdp_config:\n  sharding_strategy: SHARD_GRAD_OP\n  forward_prefetch: false\n")
    assert [note.where.rpartition(".")[2] for note in imported.notes] == ["sharding_strategy"]
    assert imported.config.engine == FSDP1(
        wrap=WrapBlocks(), sync_module_states=True, backward_prefetch="NO_PREFETCH", buffer_dtype=None
    )


def test_a_key_that_only_axolotl_looks_at_is_left_where_it_is(tmp_path: Path) -> None:
    fsdp = "fsdp_version: 2\nfsdp_config:\n  use_orig_params: true\n"
    for reader in ("optimizer: q_galore_adamw8bit\n", "plugins: [axolotl.integrations.spectrum.SpectrumPlugin]\n"):
        imported = read(tmp_path, fsdp + reader)
        assert not imported.notes
        assert "fsdp_config.use_orig_params" in {origin.key for origin in imported.not_preparation}
    assert [note.rule for note in read(tmp_path, fsdp).notes] == ["import.no-effect"]


@pytest.mark.parametrize(
    ("sizes", "mesh"),
    [
        ("dp_shard_size: 1\ndp_replicate_size: 1\n", Mesh(replicate=1, shard=-1)),
        ("dp_shard_size: 2\n", Mesh(replicate=-1, shard=2)),
        ("dp_replicate_size: 2\n", Mesh(replicate=2, shard=-1)),
        ("dp_shard_size: 1\ndp_replicate_size: 2\n", Mesh(replicate=2, shard=-1)),
        ("tensor_parallel_size: 2\n", Mesh(shard=-1, tensor=2)),
    ],
)
def test_ranks_that_no_size_names_are_laid_out_as_axolotl_does(sizes: str, mesh: Mesh, tmp_path: Path) -> None:
    text = f"micro_batch_size: 1\nfsdp_version: 2\nfsdp_config: {{offload_params: false}}\n{sizes}"
    assert read(tmp_path, text).config.mesh == mesh
    said = run("check", str(tmp_path / "axolotl.yml"), "--world-size", "8", "--per-node", "8")
    assert "mesh.not-world-size" not in said.stdout


V2, V1 = "fsdp_version: 2\nfsdp_config: {use_orig_params: false}\n", "fsdp_config: {offload_params: true}\n"
REFUSED = [
    ("dp_shard_size: 4\n", "dp_shard_size"),
    (f"{V2}optimizer: adamw_bnb_8bit\n", "optimizer"),
    (f"{V1}optimizer: adamw_bnb_8bit\n", "optimizer"),
    (f"{V1}optimizer: muon\n", "optimizer"),
    ("deepspeed: {zero_optimization: {stage: 1}}\noptimizer: flash_adamw\n", "optimizer"),
    (f"{V2}optimizer: q_galore_adamw8bit\n", "optimizer"),
    ("adapter: lora\noptimizer: q_galore_adamw8bit\n", "adapter"),
    (f"{V1}fp8: true\nfp8_enable_fsdp_float8_all_gather: true\n", "fp8_enable_fsdp_float8_all_gather"),
    ("fsdp_version: 2\nfsdp_config: {cpu_offload_pin_memory: false}\n", "fsdp_config"),
    ("fsdp_config: {reshard_after_forward: true}\n", "fsdp_config"),
    (f"{V2}rl: dpo\nload_in_4bit: true\n", "rl"),
    ("warmup_steps: 0.1\n", "warmup_steps"),
    ("warmup_steps: 5\nwarmup_ratio: 0.1\n", "warmup_ratio"),
    ("saves_per_epoch: 1\nsave_steps: 100\n", "saves_per_epoch"),
    ("save_strategy: epoch\nsave_steps: 100\n", "save_steps"),
    ("evals_per_epoch: 1\neval_steps: 100\n", "evals_per_epoch"),
    ("evals_per_epoch: 1\neval_strategy: epoch\n", "evals_per_epoch"),
    ("evaluation_strategy: epoch\neval_steps: 100\n", "eval_steps"),
    ("val_set_size: 0.0\neval_steps: 50\n", "val_set_size"),
    ("val_set_size: 0.1\ntest_datasets: [{path: a}]\n", "val_set_size"),
    ("liger_cross_entropy: true\ncut_cross_entropy: true\n", "cut_cross_entropy"),
    ("pretraining_dataset: [{path: a}]\n", "pretraining_dataset"),
    ("relora: true\njagged_restart_steps: 9\nadapter: lora\nfsdp_config: {offload_params: false}\n", "relora"),
    ("early_stopping_patience: 2\nsave_steps: 10\n", "early_stopping_patience"),
    ("unsloth_rope: true\n", "unsloth_rope"),
    ("dpo_norm_loss: false\n", "dpo_norm_loss"),
]
TAKEN = [
    "val_set_size: 0\nevals_per_epoch: 1\nsaves_per_epoch: 1\n",
    "val_set_size: 0\neval_steps: 9\ntest_datasets: [{path: a}]\n",
    "eval_strategy: steps\neval_steps: 9\nsave_strategy: steps\nsave_steps: 9\nearly_stopping_patience: 2\n",
    "dp_shard_size: 1\n",
    f"{V2}optimizer: adamw_torch_8bit\n",
    f"{V2}optimizer: muon\ndp_shard_size: 2\n",
    "fsdp_config: {version: 2}\nfp8: true\nfp8_enable_fsdp_float8_all_gather: true\noptimizer: adamw_torch_fused\n",
    f"{V2[:-2]}, reshard_after_forward: true, cpu_offload_pin_memory: false, offload_params: true}}\n",
    "warmup_steps: 10\nunsloth_rope: false\nadapter: lora\noptimizer: adamw_bnb_8bit\n",
    f"{V1}rl: dpo\nload_in_4bit: true\nadapter: qlora\n",
]


@pytest.mark.parametrize(("text", "key"), REFUSED)
def test_what_axolotl_refuses_is_an_error_at_its_key(text: str, key: str, tmp_path: Path) -> None:
    with pytest.raises(PlanRejected) as refused:
        read(tmp_path, text)
    errors = [found for found in refused.value.findings if "refuse" in found.what]
    assert [found.where.rpartition(" ")[2] for found in errors] == [key]


@pytest.mark.parametrize("text", TAKEN)
def test_what_axolotl_takes_is_no_error(text: str, tmp_path: Path) -> None:
    assert read(tmp_path, text).kind == "axolotl"
