"""Every importer has a test file of its own, and says what it does not know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prepkit.findings import PlanRejected
from prepkit.formats.importers import IMPORTERS
from prepkit.formats.importers.source import read
from tests.support.command_line import run


@pytest.mark.parametrize("name", IMPORTERS)
def test_every_importer_has_a_test_file_of_its_own(name: str) -> None:
    module = IMPORTERS[name].read.__module__.rpartition(".")[2]
    file = Path(__file__).with_name(f"test_{module}.py")
    assert file.is_file(), f"the importer of {name!r} in prepkit/formats/importers/{module}.py has no {file.name} here"


@pytest.mark.parametrize("name", IMPORTERS)
def test_a_key_that_no_importer_knows_is_a_finding_or_is_listed(name: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"no_such_key_anywhere": 1}')
    try:
        imported = IMPORTERS[name].read(read(str(file)))
        accounted = f"{imported.not_preparation} {imported.notes}"
    except PlanRejected as refused:
        accounted = str(refused)
    assert "no_such_key_anywhere" in accounted


MISSPELT = [
    ("accelerate", {"distributed_type": "MULTI_GPU", "mixed_precison": "no"}, "Write 'mixed_precision', or remove it."),
    (
        "accelerate",
        {"distributed_type": "MULTI_GPU", "gradient_accumulation_step": 4},
        "Write Accelerator(gradient_accumulation_steps=...) in the script, and remove it here.",
    ),
    (
        "accelerate",
        {"distributed_type": "MULTI_GPU", "sharding_strategy": "FULL_SHARD"},
        "Write it as fsdp_config.fsdp_sharding_strategy, with distributed_type: FSDP, and remove it here.",
    ),
    (
        "accelerate",
        {"distributed_type": "DEEPSPEED", "gradient_accumulation_step": 4},
        "Move it to 'deepspeed_config.gradient_accumulation_steps', or remove it.",
    ),
    ("transformers", {"per_device_batch_size": 4}, "Write 'per_device_train_batch_size', or remove it."),
    (
        "transformers",
        {"fsdp": True, "fsdp_config": {"versoin": 2}},
        "Write 'fsdp_config.version', or remove it.",
    ),
    ("axolotl", {"adam_eps": 1e-8}, "Write 'adam_epsilon', or remove it."),
    ("axolotl", {"sample_packin": True}, "Write 'sample_packing', or remove it."),
    ("axolotl", {"per_device_train_batch_size": 2}, "Write 'micro_batch_size', or remove it."),
    ("axolotl", {"optim": "adamw", "optimizer": "adamw"}, "Remove it: 'optimizer' is there too."),
    ("axolotl", {"full_finetune": True}, "Remove it."),
    ("llamafactory", {"gradient_accumulation_step": 4}, "Write 'gradient_accumulation_steps', or remove it."),
    ("llamafactory", {"pure_bf": True}, "Write 'pure_bf16', or remove it."),
    ("llamafactory", {"per_device_train_batchsize": 1}, "Write 'per_device_train_batch_size', or remove it."),
    ("torchtitan", {"optimizer": {"learning_rate": 1}}, "Write 'optimizer.lr', or remove it."),
    ("torchtitan", {"training": {"local_batchsize": 1}}, "Write 'training.local_batch_size', or remove it."),
    ("prepkit", {"engine": "DDP", "acumulation": 4}, "write 'accumulation' instead"),
    (
        "prepkit",
        {"engine": "DDP", "weigth_decay": 0.1},
        'move it into \'optimizer\': "optimizer": {"kind": "AdamW", "weight_decay": 0.1}',
    ),
]
"""Whose file, what stands in it with one key that nobody reads, and what is proposed for it."""


@pytest.mark.parametrize(("name", "data", "fix"), MISSPELT)
def test_an_unknown_key_is_told_with_the_one_that_is_meant(
    name: str, data: dict[str, object], fix: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(data))
    try:
        findings = IMPORTERS[name].read(read(str(file))).notes
    except PlanRejected as refused:
        findings = refused.findings
    assert [one.fix for one in findings if one.rule.endswith(".unknown-key")] == [fix]


@pytest.mark.parametrize("plugins", [["axolotl.integrations.liger.LigerPlugin"], ["mine.Plugin"]])
def test_a_plugin_of_others_may_read_keys_that_axolotl_does_not(plugins: list[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"base_model": "m", "plugins": plugins, "of_the_plugin": 1}))
    imported = IMPORTERS["axolotl"].read(read(str(file)))
    told = [one.where.rpartition(" ")[2] for one in imported.notes]
    listed = [origin.key for origin in imported.not_preparation if origin.key == "of_the_plugin"]
    assert (told, listed) == (([], ["of_the_plugin"]) if plugins == ["mine.Plugin"] else (["of_the_plugin"], []))


def test_no_importer_hides_another_by_its_marks() -> None:
    """A file is the first's whose mark it shows, so a mark that stands twice would never be the second's."""
    told: set[str] = set()
    for name, importer in IMPORTERS.items():
        assert importer.marks, f"{name!r}: nobody would take a file for one of its; give its row in IMPORTERS marks"
        assert not told.intersection(importer.marks), name
        told.update(importer.marks)


@pytest.mark.parametrize(
    ("kind", "text", "key"),
    [
        ("accelerate", "distributed_type: FSDP\nnum_processes: {}\nunknown: 1\n", "num_processes"),
        ("accelerate", "distributed_type: FSDP\nnum_machines: {}\nunknown: 1\n", "num_machines"),
        (
            "accelerate",
            "distributed_type: FSDP\nparallelism_config: {{parallelism_config_dp_shard_size: {}}}\nunknown: 1\n",
            "parallelism_config.parallelism_config_dp_shard_size",
        ),
        ("axolotl", "base_model: a/b\ndp_shard_size: {}\nfsdp_config: {{unknown: 1}}\n", "dp_shard_size"),
        (
            "torchtitan",
            "[parallelism]\ndata_parallel_shard_degree = {}\ntensor_paralel_degree = 1\n",
            "parallelism.data_parallel_shard_degree",
        ),
        (
            "torchtitan",
            (
                "parallelism = {{tensor_parallel_degree = 2, data_parallel_shard_degree = 2147483647, "
                "tensor_paralel_degree = {}}}\n"
            ),
            "parallelism.data_parallel_shard_degree",
        ),
    ],
)
@pytest.mark.parametrize("number", [2**31, 10**25])
def test_more_processes_than_any_job_has_are_a_finding_beside_the_others(
    kind: str, text: str, key: str, number: int, tmp_path: Path
) -> None:
    file = tmp_path / ("a.toml" if kind == "torchtitan" else "a.yaml")
    file.write_text(text.format(number))
    done = run("check", str(file), "--from", kind, "--json")
    told = {(one["rule"], one["where"].rpartition(" ")[2]) for one in json.loads(done.stdout)["findings"]}
    assert {rule for rule, _ in told} == {"import.wrong-value", "import.unknown-key"}
    assert ("import.wrong-value", key) in told
