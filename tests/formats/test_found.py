"""What a file is taken for, whatever one mistake is in it; and which files are nobody's here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prepkit.cli.examined import files_found
from prepkit.formats.found import below, found

MISSPELT = {
    "engine.toml": ('engine = "fsdp2"\noptimizer = "AdamW"\nprecision = "BF16"\n', "prepkit"),
    "kind.toml": ('engine = { kind = "fsdp2" }\n', "prepkit"),
    "other.yaml": ("engine: Horovod\noptimizer: AdamW\nprecision: BF16\n", "prepkit"),
    "egnine.toml": ('egnine = "FSDP2"\noptimizer = "AdamW"\nprecision = "BF16"\nmesh = {shard = 2}\n', "prepkit"),
    "acc.yaml": ("distributed_typ: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_confg: {}\n", "accelerate"),
    "args.json": (
        '{"output_dir":"o","per_device_train_batch_size":4,"bf16":true,"gradient_acumulation_steps":8}',
        "transformers",
    ),
    "ds.json": ('{"train_batch_siz": 8, "zero_optimisation": {"stage": 2}, "fp16": {"enabled": true}}', "deepspeed"),
    "axo.yaml": ("base_modle: a\ndatasets: []\nmicro_batch_size: 1\nlearning_rate: 1e-4\n", "axolotl"),
    "lf.yaml": ("model_name_or_pth: a\nstage: sft\ndo_train: true\nfinetuning_type: lora\n", "llamafactory"),
    "titan.toml": ("[job]\n[model]\n[trainning]\nsteps = 1\n[parallelism]\n[optimizer]\n", "torchtitan"),
}


@pytest.mark.parametrize("name", MISSPELT)
def test_one_mistake_hides_no_file(name: str, tmp_path: Path) -> None:
    text, kind = MISSPELT[name]
    (tmp_path / name).write_text(text)
    one = found(str(tmp_path / name))
    assert one is not None
    assert one.kind == kind


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-16-le"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_file_is_told_however_it_is_saved(encoding: str, end: str, tmp_path: Path) -> None:
    mark = "\ufeff" if encoding in ("utf-16-be", "utf-16-le") else ""
    text = f"{mark}compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n".replace("\n", end)
    (tmp_path / "acc.yaml").write_bytes(text.encode(encoding))
    one = found(str(tmp_path / "acc.yaml"))
    assert one is not None
    assert one.kind == "accelerate"


FOREIGN = {
    "package.json": '{"name": "x", "version": "1", "engines": {"node": ">=18"}, "scripts": {}, "dependencies": {}}',
    "pyproject.toml": '[project]\nname = "x"\n[build-system]\nrequires = []\n[tool.ruff]\nline-length = 120\n',
    "config.json": '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "use_cache": true}',
    "generation_config.json": '{"bos_token_id": 1, "eos_token_id": 2, "use_cache": true, "max_length": 9}',
    "tokenizer_config.json": '{"add_bos_token": true, "model_max_length": 1, "padding_side": "left", "use_fast": true}',
    "adapter_config.json": '{"base_model_name_or_path": "a", "peft_type": "LORA", "lora_alpha": 16, "r": 8}',
    "trainer_state.json": '{"best_metric": 1, "epoch": 1, "eval_steps": 5, "global_step": 1, "logging_steps": 5,'
    ' "max_steps": 9, "num_train_epochs": 1, "save_steps": 5, "log_history": [], "train_batch_size": 8}',
    "lightning.yaml": "trainer:\n  precision: bf16\nmodel: {}\noptimizer: {}\ndata: {}\n",
    "ours.yaml": "seed: 1\nlearning_rate: 1e-4\nweight_decay: 0.1\nmax_steps: 10\nwarmup_steps: 1\n",
    "hydra.yaml": "defaults: []\noptimizer: {lr: 1}\nprecision: bf16\nmesh: [2, 4]\nmodel: {}\n",
    "compose.yaml": "services: {}\nvolumes: {}\nkind: Deployment\nengine: postgres\n",
    "single.yaml": "engine: single\nhost: h\nport: 1\n",
    "recipe.yaml": "optimizer: adamw\nprecision: bf16\nclip: 1.0\naccumulation: 4\n",
    "data.json": '{"train_batch_size": 8, "optimizer": "adam", "epochs": 3, "lr": 0.1}',
    "neox.json": '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "num-layers": 12,'
    ' "pipe-parallel-size": 1, "hidden-size": 768, "train-iters": 9, "data-impl": "mmap"}',
    "template.json": '{"train_batch_size": CONFIG_BATCH_SIZE, "zero_optimization": {"stage": ${zero_stage}},\n'
    ' "fp16": {"enabled": "FP16", "loss_scale": QuantW_SCALE}}',
    "config.yaml": "_wandb:\n  value:\n    cli_version: 0.23.1\noutput_dir:\n  value: o\nlearning_rate:\n  value: 1\n"
    "per_device_train_batch_size:\n    value: 2\n",
    "older.yaml": "wandb_version: 1\noutput_dir:\n  desc: null\n  value: o\nlearning_rate:\n  desc: null\n"
    "  value: 1\nper_device_train_batch_size:\n  desc: null\n  value: 2\n",
    "values.yaml": "output_dir:\n  value: o\nlearning_rate:\n  value: 1\nper_device_train_batch_size:\n  value: 2\n",
    "diffusers.yaml": "output_dirs: [a]\nresolution: 512\nlearning_rates: [1]\n",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_of_others_is_taken_for_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FOREIGN[name])
    assert found(str(tmp_path / name)) is None


@pytest.mark.parametrize("text", ['{"train_batch_size": TRUE}', '{"train_batch_size": 8 "zero_optimization": {}}'])
def test_a_mistake_in_a_value_makes_no_template(text: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        text.replace("}", ',\n"zero_optimization": {"stage": 2},\n"steps_per_print": 1}', 1)
    )
    assert found(str(tmp_path / "ds.json")) is not None


RUN = "torchrun --nproc_per_node 8 train.py\n"
SCRIPTS = {
    "launch": f"#!/bin/bash\n{RUN}",
    "env": f"#!/usr/bin/env -S bash -e\n{RUN}",
    "job.v1.2": f"#!/bin/sh\n#SBATCH -N1\n{RUN}",
    "train.job": f"# of our cluster\n\n#SBATCH --nodes=1\n{RUN}",
    "tasks": "#!/bin/bash\nsrun --nodes=2 \\\n  python train.py\n",
    "long": f"#!/bin/bash\n{'# so it is' * 1000}\n{RUN}",
}
NO_SCRIPTS = {
    "python": f"#!/usr/bin/env python\n#SBATCH -N1\n{RUN}",
    "fish": f"#!/usr/bin/fish\n{RUN}",
    "notes": f"# Notes\n{RUN}",
    "gradlew": "#!/bin/sh\nexec java\n",
    "hosts": "#!/bin/bash\nsrun hostname\n",
    "data.bin": "\x00#!/bin/bash\ntorchrun",
}


@pytest.mark.parametrize("name", SCRIPTS | NO_SCRIPTS)
def test_a_script_is_told_by_how_it_begins_whatever_it_is_called(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text((SCRIPTS | NO_SCRIPTS)[name])
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    told = [one.sort for path in below(str(tmp_path)) if (one := found(path)) is not None]
    assert told == (["script"] if name in SCRIPTS else [])


def test_of_a_large_file_the_beginning_alone_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "weights").open("wb") as file:
        file.write(b"#!/usr/bin/env python\n")
        file.truncate(2**40)
    assert list(below(str(tmp_path))) == []


def test_folders_of_what_runs_have_left_are_passed_by(tmp_path: Path) -> None:
    for name in ("mlruns/0/config.yaml", "lightning_logs/version_0/config.yaml", "configs/config.yaml"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("distributed_type: MULTI_GPU\n")
    assert list(below(str(tmp_path))) == [str(tmp_path / "configs/config.yaml")]


def test_what_a_tracker_has_noted_is_no_config_where_it_is_named_either(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(FOREIGN["config.yaml"])
    assert files_found((str(tmp_path / "config.yaml"),), None) == []
    assert [one.kind for one in files_found((str(tmp_path / "config.yaml"),), "transformers")] == ["transformers"]
