"""What a library does in a way of its own, and is right: no finding tells its users of prepkit's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prepkit.config import FSDP1, DeepSpeed
from prepkit.formats.importers import import_config
from tests.support.command_line import run


def test_accumulation_that_a_launch_config_leaves_to_the_trainer_is_left_open(tmp_path: Path) -> None:
    """accelerate's plugin keeps the word, and the Trainer fills it in."""
    (tmp_path / "a.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2, gradient_accumulation_steps: auto}\n"
    )
    config = import_config(tmp_path / "a.yaml").config
    assert (type(config.engine), config.accumulation) == (DeepSpeed, None)


@pytest.mark.parametrize(
    ("asked", "machines", "sharding"),
    [
        ("HYBRID_SHARD", 1, "FULL_SHARD"),
        ("HYBRID_SHARD_ZERO2", 1, "SHARD_GRAD_OP"),
        ("HYBRID_SHARD", 2, "HYBRID_SHARD"),
        ("FULL_SHARD", 1, "FULL_SHARD"),
    ],
)
def test_a_copy_for_each_machine_of_one_is_one_copy(asked: str, machines: int, sharding: str, tmp_path: Path) -> None:
    """torch makes a group of copies with one member, and shards over the ranks of the machine."""
    path = tmp_path / "a.yaml"
    path.write_text(
        f"distributed_type: FSDP\nnum_machines: {machines}\nnum_processes: 8\nfsdp_config:\n"
        f"  fsdp_sharding_strategy: {asked}\n  fsdp_cpu_ram_efficient_loading: false\n"
    )
    engine = import_config(path).config.engine
    assert isinstance(engine, FSDP1)
    assert engine.sharding == sharding
    assert json.loads(run("check", str(path), "--json").stdout)["findings"] == []


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
