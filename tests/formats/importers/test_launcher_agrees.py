"""A file, and the variables that accelerate's own launcher sets from it, are read as the same config."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from prepkit.config import Config
from prepkit.formats.importers import import_config
from prepkit.formats.importers.accelerate import read_variables

DEEPSPEED = "distributed_type: DEEPSPEED\nnum_processes: 2\n"
FSDP = "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: bf16\n"
TEXTS = (
    "distributed_type: 'NO'\nnum_processes: 1\nmixed_precision: fp16\n",
    "distributed_type: MULTI_GPU\nnum_processes: 2\ndynamo_config: {backend: inductor, use_dynamic: true}\n",
    "distributed_type: MULTI_GPU\nnum_processes: 2\ndynamo_config: {dynamo_backend: 'NO', dynamo_mode: default}\n",
    f"{FSDP}fsdp_config: {{}}\n",
    f"{FSDP}fsdp_config: {{sharding_strategy: 2, offload_params: true, transformer_layer_cls_to_wrap: Block}}\n",
    f"{FSDP}fsdp_config: {{fsdp_auto_wrap_policy: SIZE_BASED_WRAP}}\n",
    f"{FSDP}fsdp_config: {{fsdp_version: 2, fsdp_reshard_after_forward: false}}\n",
    f"{FSDP}fsdp_config: {{fsdp_version: 2, activation_checkpointing: true, fsdp_cpu_ram_efficient_loading: false}}\n",
    f"{DEEPSPEED}deepspeed_config: {{zero_stage: 3, zero3_init_flag: true, gradient_clipping: 0.5}}\n",
    f"{DEEPSPEED}deepspeed_config: {{zero_stage: 1}}\ndynamo_config: {{dynamo_backend: INDUCTOR}}\n",
    f"{DEEPSPEED}deepspeed_config: {{deepspeed_config_file: zero.conf}}\n",
)


def variables(file: Path) -> dict[str, str]:
    """What the launcher adds to the environment for this file; nothing is started."""
    commands = pytest.importorskip("accelerate.commands.launch")
    launch = pytest.importorskip("accelerate.utils.launch")
    args = commands.launch_command_parser().parse_args(["--config_file", str(file), "script.py"])
    args, defaults, precision_from_file = commands._validate_launch_command(args)
    made: Any
    if args.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if precision_from_file else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        _, made = launch.prepare_deepspeed_cmd_env(args)
    elif args.use_fsdp or args.multi_gpu:
        made = launch.prepare_multi_gpu_env(args)
    else:
        _, made = launch.prepare_simple_launcher_cmd_env(args)
    return {name: value for name, value in made.items() if os.environ.get(name) != value}


def settings(config: Config) -> Config:
    return evolve(config, origins=())


@pytest.mark.parametrize("text", TEXTS)
def test_a_file_and_the_variables_made_of_it_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zero.conf").write_text('{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}}')
    (tmp_path / "launch.yaml").write_text(text)
    imported = import_config(tmp_path / "launch.yaml")
    said = variables(tmp_path / "launch.yaml") | {"WORLD_SIZE": str(imported.world_size)}
    assert settings(read_variables(said).config) == settings(imported.config)
