"""What a library does in a way of its own, and is right: no finding tells its users of prepkit's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attrs import evolve

from prepkit import planner
from prepkit.config import FSDP1, Config, DeepSpeed
from prepkit.formats.exporters import export_config
from prepkit.formats.importers import import_config
from prepkit.steps import WrapFSDP1
from prepkit.testing import tiny_facts
from tests.support.command_line import run


def test_accumulation_that_a_launch_config_leaves_to_the_trainer_is_left_open(tmp_path: Path) -> None:
    """accelerate's plugin keeps the word, and the Trainer fills it in."""
    (tmp_path / "a.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2, gradient_accumulation_steps: auto}\n"
    )
    config = import_config(tmp_path / "a.yaml").config
    assert (type(config.engine), config.accumulation) == (DeepSpeed, None)


@pytest.mark.parametrize("machines", [1, 2])
@pytest.mark.parametrize(
    ("asked", "alone"),
    [
        ("HYBRID_SHARD", "FULL_SHARD"),
        ("HYBRID_SHARD_ZERO2", "SHARD_GRAD_OP"),
        ("FULL_SHARD", "FULL_SHARD"),
        ("SHARD_GRAD_OP", "SHARD_GRAD_OP"),
    ],
)
def test_a_copy_for_each_machine_of_one_is_one_copy(asked: str, alone: str, machines: int, tmp_path: Path) -> None:
    """torch makes a group of copies with one member, and shards over the ranks of the machine.

    What the file asks for stays: it is written back, and followed where there are more machines.
    """
    path = tmp_path / "a.yaml"
    path.write_text(
        f"distributed_type: FSDP\nnum_machines: {machines}\nnum_processes: 8\nfsdp_config:\n"
        f"  fsdp_sharding_strategy: {asked}\n  fsdp_cpu_ram_efficient_loading: false\n"
    )
    imported = import_config(path)
    assert isinstance(imported.config.engine, FSDP1)
    assert imported.config.engine.sharding == asked
    assert f"fsdp_sharding_strategy: {asked}" in export_config(imported.config, "accelerate", world_size=8).text
    assert json.loads(run("check", str(path), "--json").stdout)["findings"] == []
    for world, per_node in ((8, 8 // machines), (16, 8), (4, 8), (1, 1)):
        copies = world // per_node if asked != alone and world > per_node else 1
        facts = tiny_facts(world=world)
        facts = evolve(facts, env=evolve(facts.env, per_node=per_node))
        made = planner.plan(Config(engine=FSDP1(sharding=imported.config.engine.sharding)), facts).unwrap()
        strategy = "NO_SHARD" if world == 1 else asked if copies > 1 else alone
        assert [one.step.sharding for one in made.steps if isinstance(one.step, WrapFSDP1)] == [strategy]
        assert {axis.name: axis.size for axis in made.mesh}.get("replicate", 1) == copies


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("output_dir: x\nmax_steps: 9\ngradient_checkpointing: true\n", {"checkpoint.cache"}),
        ("model_name_or_path: m\nstage: sft\noutput_dir: x\n", {"checkpoint.cache"}),
        ("base_model: m\nadapter: lora\ngradient_checkpointing: true\n", {"checkpoint.cache"}),
        (
            "base_model: m\nadapter: lora\ngradient_checkpointing: offload\ntorch_compile: true\n",
            {"checkpoint.cache", "checkpoint.offload-compiled"},
        ),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_activation_checkpointing: true}\n", set()),
    ],
)
def test_a_library_names_the_rules_whose_harm_it_keeps_away(text: str, rules: set[str], tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    assert set(import_config(tmp_path / "a.yaml").seen_to) == rules


_ZERO = "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config: "
_FALLING = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}
_AXIS = "parallelism_config_"
_FSDP = "distributed_type: FSDP\nnum_processes: 8\n"


@pytest.mark.parametrize(
    ("name", "text", "fix"),
    [
        (
            "a.yaml",
            f"{_ZERO}{{zero_stage: 2, offload_optimizer_device: nvme}}\n",
            "Write `deepspeed_config.offload_optimizer_nvme_path` with a folder on that drive.",
        ),
        (
            "a.yaml",
            f"{_ZERO}{{zero_stage: 2, offload_param_device: cpu}}\n",
            "Write zero_stage: 3 or higher, or leave offload_param out.",
        ),
        ("a.yaml", f"{_ZERO}{{zero_stage: three, zero3_init_flag: true}}\n", "Write a number."),
        (
            "a.yaml",
            "distributed_type: MULTI_CPU\nnum_processes: 8\nmixed_precision: fp16\n",
            "Write mixed_precision: bf16 or mixed_precision: 'no'.",
        ),
        (
            "a.yaml",
            f"{_FSDP}parallelism_config: {{{_AXIS}dp_replicate_size: 2, {_AXIS}dp_shard_size: 3}}\n",
            "Write dp_replicate_size: 2 with dp_shard_size: 4 or ",
        ),
        (
            "a.json",
            '{"zero_optimization": {"stage": 1}, "gradient_clipping": -1.0}',
            'Write a limit above 0, such as "gradient_clipping": 1.0, or 0.0 for none.',
        ),
        (
            "a.json",
            json.dumps({"zero_optimization": {"stage": 1}, "scheduler": _FALLING}),
            "Write the steps of the whole run.",
        ),
        ("a.toml", "[training]\nmax_norm = -1.0\n", "Write a limit above 0, such as training.max_norm = 1.0."),
        ("b.yaml", "output_dir: x\nmax_steps: 9\nfsdp: full_shrad\n", "Write full_shard in its place."),
    ],
)
def test_a_fix_is_what_is_typed_in_the_file(name: str, text: str, fix: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    (found,) = json.loads(run("check", str(tmp_path / name), "--json").stdout)["findings"]
    assert found["fix"].startswith(fix)


_BORROWED = """\
model_name_or_path: a/b
output_dir: x
per_device_train_batch_size: 1
learning_rate: 1.0e-5
num_train_epochs: 2
warmup_ratio: 0.03
report_to: [wandb]
"""
_STRANGE = {
    "open-instruct": "dataset_mixer: {a: 1}\nwith_tracking: true\ncheckpointing_steps: 9\nuse_slow_tokenizer: true\n",
    "ms-swift": "model: a\ntuner_type: lora\nsplit_dataset_ratio: 0.1\nmodel_author: b\nsave_safetensors: true\n",
    "torchtune": "tokenizer: {_component_: t}\ncheckpointer: {_component_: c}\ncustom_sharded_layers: []\n",
}


@pytest.mark.parametrize("program", _STRANGE)
def test_a_program_with_arguments_of_its_own_does_with_a_key_what_it_likes(program: str, tmp_path: Path) -> None:
    """open-instruct has its own dataclasses, ms-swift turns ``warmup_ratio`` into steps: neither refuses a key."""
    (tmp_path / "a.yaml").write_text(_BORROWED + _STRANGE[program])
    assert json.loads(run("check", str(tmp_path), "--json").stdout)["findings"] == []


@pytest.mark.parametrize(
    "more",
    [
        "",
        "warmup_stepz: 3\nloging_steps: 1\nsave_stratgy: 'no'\n",
        "dataset_name: a\nmax_seq_length: 9\nuse_peft: true\nlora_r: 8\ntorch_dtype: bfloat16\nmy_own: 1\n",
    ],
)
def test_a_key_that_is_gone_is_told_beside_slips_and_keys_of_scripts_that_use_the_class(
    more: str, tmp_path: Path
) -> None:
    (tmp_path / "a.yaml").write_text(_BORROWED + more)
    found = json.loads(run("check", str(tmp_path), "--json").stdout)["findings"]
    assert [one["rule"] for one in found] == ["import.unknown-key"] * (1 + 3 * more.startswith("warmup_stepz"))


def test_a_program_that_hands_a_part_of_its_file_to_deepspeed_is_asked_about_that_part_alone(tmp_path: Path) -> None:
    data = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    neox = {"num-layers": 12, "pipe-parallel-size": 1, "hidden-size": 768, "train-iters": 9}
    path = tmp_path / "neox.json"
    path.write_text(json.dumps(data | neox))
    assert json.loads(run("check", str(path), "--json").stdout)["findings"] == []
    assert {origin.key for origin in import_config(path, "deepspeed").not_preparation} == neox.keys()
    path.write_text(json.dumps(data | {"num-layers": 12, "my-own": 1}))
    found = json.loads(run("check", str(path), "--json").stdout)["findings"]
    assert [one["rule"] for one in found] == ["deepspeed.unknown-key"] * 2


def test_how_many_copies_there_are_is_not_guessed_where_nobody_says_how_large_a_node_is(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("output_dir: x\nmax_steps: 9\nfsdp: hybrid_shard auto_wrap\nfsdp_config: {version: 1}\n")
    words = ("check", str(path), "--world-size", "8", "--json")
    for more, known in (((), False), (("--per-node", "4"), True), (("--per-node", "8"), True)):
        said = json.loads(run(*words, *more).stdout)
        assert said["findings"] == []
        assert ("the processes of a node" not in said["files"][0]["not_known"]) is known
    alone = json.loads(run(*words, "--per-node", "1").stdout)["findings"]
    assert [one["rule"] for one in alone] == ["fsdp1.mesh"]
