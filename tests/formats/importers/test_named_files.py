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
