"""Values that say nothing of preparation, and that the library whose file it is refuses."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path

import pytest

from prepkit.formats.importers.argument_values import CHOICES, NUMBERS
from tests.support.command_line import run


def test_numbers_and_words_are_those_of_the_installed_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    if transformers.__version__.split(".")[0] != "5":
        pytest.skip("the tables are of transformers 5")
    hints = typing.get_type_hints(transformers.TrainingArguments)
    kinds = {
        one.name: {*(typing.get_args(hints[one.name]) or (hints[one.name],))} - {type(None)}
        for one in dataclasses.fields(transformers.TrainingArguments)
    }
    assert {*NUMBERS} <= {name for name, kind in kinds.items() if kind <= {int, float}}
    for name, words in CHOICES.items():
        (enum,) = kinds[name] - {str}
        assert words == tuple(member.value for member in enum), name


TRAINER = "output_dir: x\nmax_steps: 9\n"
LLAMA = "model_name_or_path: m\nstage: sft\noutput_dir: x\n"
AXOLOTL = "base_model: m\nadapter: lora\n"
LAUNCH = "distributed_type: MULTI_GPU\nnum_processes: 8\n"


@pytest.mark.parametrize(
    ("text", "rule", "fix"),
    [
        (f"{TRAINER}per_device_train_batch_size: four", "wrong-type", "Write a number."),
        (f"{TRAINER}per_device_train_batch_size: 0", "wrong-value", "Write 1 or more."),
        (f"{TRAINER}learning_rate: high", "wrong-type", "Write a number."),
        (f"{TRAINER}learning_rate: .nan", "wrong-value", "Write a finite number from 0."),
        (f"{TRAINER}learning_rate: 1e400", "wrong-value", "Write a finite number from 0."),
        (f"{TRAINER}adam_beta2: 9.99", "wrong-value", "Write a number from 0 and below 1."),
        (f"{TRAINER}warmup_steps: -5", "wrong-value", "Write 0 or more."),
        (f"{TRAINER}per_device_eval_batch_size: -4", "wrong-value", "Write 1 or more."),
        (f"{TRAINER}seed: -1", "wrong-value", "Write 0 to 4294967295."),
        (f"{TRAINER}logging_steps: 0", "wrong-value", "Write 1 or more, or logging_strategy: 'no'."),
        (f"{TRAINER}save_steps: 10.5", "wrong-value", "Write 10."),
        (f"{TRAINER}optim: adamw_tourch", "wrong-value", "Write 'adamw_torch'."),
        (f"{TRAINER}lr_scheduler_type: cosin", "wrong-value", "Write 'cosine'."),
        (f"{TRAINER}load_best_model_at_end: true", "contradiction", "Write eval_strategy: steps."),
        (
            f"{TRAINER}load_best_model_at_end: true\neval_strategy: epoch",
            "contradiction",
            "Write save_strategy: epoch.",
        ),
        (
            f"{TRAINER}gradient_checkpointing: true\nfsdp: true\nfsdp_config: {{activation_checkpointing: true}}",
            "contradiction",
            "Keep one of them.",
        ),
        (f"{LLAMA}per_device_train_batch_size: 0", "wrong-value", "Write 1 or more."),
        (f"{LLAMA}finetuning_type: fulll", "wrong-value", "Write full."),
        (f"{LLAMA.replace('sft', 'stf')}", "wrong-value", "Write sft."),
        (f"{LLAMA}finetuning_type: full\nquantization_bit: 4", "contradiction", "Write finetuning_type: lora,"),
        (f"{AXOLOTL}micro_batch_size: 0", "wrong-value", "Write 1 or more."),
        (f"{AXOLOTL}learning_rate: high", "wrong-type", "Write a number."),
        ("base_model: m\nadapter: qlora\n", "contradiction", "Write load_in_4bit: true, or adapter: lora."),
        ("base_model: m\nadapter: qlora\nload_in_8bit: true\n", "contradiction", "Write load_in_4bit: true in its"),
        (f"{LAUNCH}num_machines: 4\nmachine_rank: 4", "contradiction", "Write the number of this machine, from 0."),
        (f"{LAUNCH}main_process_port: abc", "wrong-type", "Write a number."),
    ],
)
def test_what_its_library_refuses_is_told_and_hides_no_rule(text: str, rule: str, fix: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"{text}\n")
    data = json.loads(run("check", str(tmp_path / "a.yaml"), "--json").stdout)
    assert [(one["rule"], one["fix"].startswith(fix)) for one in data["findings"]] == [(f"import.{rule}", True)]
    assert data["files"][0]["rules_that_hold"] > 100


@pytest.mark.parametrize(
    "text",
    [
        f"{TRAINER}per_device_train_batch_size: '4'\nlearning_rate: 5.0e-6\noptim: adamw_hf\nsave_steps: 0.1",
        f"{TRAINER}per_device_train_batch_size: ${{BATCH}}\neval_strategy: ${{HOW}}",
        f"{TRAINER}load_best_model_at_end: true\neval_strategy: steps",
        f"{TRAINER}load_best_model_at_end: true\neval_strategy: epoch\nsave_strategy: best",
        f"{TRAINER}load_best_model_at_end: false",
        f"{LLAMA}finetuning_type: lora\nquantization_bit: 4",
        f"{AXOLOTL}optimizer: adopt_adamw\nlr_scheduler: rex",
        "base_model: m\nadapter: qlora\nload_in_4bit: true\n",
        f"{LAUNCH}num_machines: 4\nmachine_rank: 3\nmain_process_port: '29500'",
        f"{LAUNCH}machine_rank: 0\nmain_process_port: null",
    ],
)
def test_what_its_library_takes_is_no_finding(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"{text}\n")
    assert json.loads(run("check", str(tmp_path / "a.yaml"), "--json").stdout)["findings"] == []


TEXTS = {"1e-5": "1.0e-5", "2E-2": "2.0e-2", "1.5e3": "1500", "1e3": "1000", ".5e1": "5"}
NUMBERS_THERE = ("1.0e-5", "2.0e+1", "0.00001", "1000", ".5e-1")


def test_a_number_that_the_trainer_gets_as_text_is_told_and_one_that_it_counts_with_is_not(tmp_path: Path) -> None:
    """As ``HfArgumentParser.parse_yaml_file`` reads it, which is PyYAML; others make a number of it by themselves."""
    transformers = pytest.importorskip("transformers")
    file = tmp_path / "a.yaml"
    for typed in (*TEXTS, *NUMBERS_THERE):
        file.write_text(f"{TRAINER}learning_rate: {typed}\n")
        parser = transformers.HfArgumentParser(transformers.TrainingArguments)
        (arguments,) = parser.parse_yaml_file(str(file))
        data = json.loads(run("check", str(file), "--json").stdout)
        said = [(one["line"], one["severity"], one["fix"]) for one in data["findings"]]
        assert isinstance(arguments.learning_rate, str) is (typed in TEXTS), typed
        assert said == ([(3, "warning", f"Write {TEXTS[typed]}.")] if typed in TEXTS else []), typed
    for text in (f"{LLAMA}learning_rate: 1e-5", f"{AXOLOTL}learning_rate: 1e-5", LAUNCH):
        file.write_text(f"{text}\n")
        assert "wrong-type" not in run("check", str(file), "--json").stdout
    (tmp_path / "a.json").write_text('{"output_dir": "x", "max_steps": 9, "learning_rate": 1e-5}')
    assert "wrong-type" not in run("check", str(tmp_path / "a.json"), "--json").stdout
