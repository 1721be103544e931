"""Files that a config names: read beside it, told where they are missing, and left where nobody can look."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command_line import run, workplace


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from workplace(tmp_path, monkeypatch)


_NAMING = {
    "accelerate": "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config: {{deepspeed_config_file: {}}}\n",
    "transformers": "output_dir: x\nmax_steps: 9\ndeepspeed: {}\n",
    "llamafactory": "model_name_or_path: m\nstage: sft\noutput_dir: x\ndeepspeed: {}\n",
    "axolotl": "base_model: some/model\nadapter: lora\ndeepspeed: {}\n",
    "of a section": "output_dir: x\nmax_steps: 9\nfsdp: true\nfsdp_config: {}\n",
}


@pytest.mark.parametrize("text", _NAMING.values(), ids=_NAMING)
@pytest.mark.parametrize(
    ("named", "rule", "known"),
    [
        ("ds.json", "import.missing-file", True),
        ("../conf/ds.json", "import.missing-file", True),
        ("/nfs/of-the-cluster/ds.json", "import.elsewhere", False),
        ("$SHARED/ds.json", "import.elsewhere", False),
        ("zero3", "import.elsewhere", False),  # of ms-swift, which brings files of its own
    ],
)
def test_a_file_that_a_config_names_and_is_not_there_is_wrong(
    text: str, named: str, rule: str, known: bool, folder: Path
) -> None:
    Path("run.yaml").write_text(text.format(named))
    data = json.loads(run("check", "run.yaml", "--json").stdout)
    said = {(one["rule"], one["line"]) for one in data["findings" if known else "cannot_know"]}
    assert (rule, len(text.splitlines())) in said
    assert run("gate", "run.yaml", "--strict").exit_code == int(known)


def test_a_file_is_found_from_a_folder_above_the_config_that_names_it(folder: Path) -> None:
    """As in a repository whose scripts are run from its top, and that is checked from anywhere."""
    Path("repo/examples/train").mkdir(parents=True)
    Path("repo/examples/ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    Path("repo/examples/train/run.yaml").write_text("output_dir: x\nmax_steps: 9\ndeepspeed: examples/ds.json\n")
    assert json.loads(run("check", "repo", "--json").stdout)["findings"] == []


def test_a_deepspeed_config_that_is_written_out_as_text_names_no_file(folder: Path) -> None:
    Path("run.yaml").write_text("""output_dir: x\nmax_steps: 9\ndeepspeed: '{"zero_optimization": {"stage": 4}}'\n""")
    data = json.loads(run("check", "run.yaml", "--json").stdout)
    assert {one["rule"] for one in data["findings"]} == {"deepspeed.stage"}


_LINE = "torchrun --nproc_per_node 4 train.py --output_dir o --per_device_train_batch_size 1 --fsdp full_shard"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.yaml", "output_dir: o\nmax_steps: 9\nfsdp: true\nfsdp_config: fsdp.json\n"),
        ("run.sh", f"#!/bin/bash\n{_LINE} --fsdp_config fsdp.json\n"),
    ],
)
def test_what_is_wrong_in_a_section_that_is_named_stands_at_its_line_there(name: str, text: str, folder: Path) -> None:
    Path("fsdp.json").write_text('{\n  "version": 2,\n  "cpu_offlod": true,\n  "min_num_params": 3\n}\n')
    Path(name).write_text(text)
    found = json.loads(run("check", name, "--json").stdout)["findings"]
    assert [(one["rule"], one["file"], one["line"], one["fix"]) for one in found] == [
        ("import.no-effect", "fsdp.json", 4, "Remove it."),
        ("import.unknown-key", "fsdp.json", 3, "Write 'cpu_offload', or remove it."),
    ]


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("""'{"cpu_offload": true}'""", []),
        ('"{\\"cpu_offload\\": true}"', []),
        ("""'{"cpu_offlod": true}'""", [("import.unknown-key", "Write 'fsdp_config.cpu_offload', or remove it.")]),
        ("""'{"cpu_offload": tru}'""", [("import.wrong-value", "Write it as JSON, or the path of a JSON file.")]),
    ],
)
def test_a_section_that_a_line_types_out_is_read_as_json(
    typed: str, found: list[tuple[str, str]], folder: Path
) -> None:
    """As ``TrainingArguments`` reads what begins with a brace."""
    Path("run.sh").write_text(f"#!/bin/bash\n{_LINE} --fsdp_config {typed}\n")
    data = json.loads(run("check", "run.sh", "--json").stdout)
    assert [(one["rule"], one["fix"]) for one in data["findings"]] == found
    assert [(one["line"], one["column"]) for one in data["findings"]] == [(2, len(_LINE) + 2)] * len(found)
    assert data["cannot_know"] == []
