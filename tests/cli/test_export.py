"""``prepkit export``: what is printed, what is written, and what ends it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from prepkit.formats.importers import import_config
from tests.support.command_line import run, workplace


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from workplace(tmp_path, monkeypatch)


def test_a_file_of_another_library_is_printed_or_written_with_what_lies_beside_it(folder: Path) -> None:
    Path("ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    words = ("export", "ds.json", "--to", "accelerate", "--world-size", "4")
    printed = run(*words)
    assert (printed.exit_code, printed.stderr) == (0, "")
    assert "deepspeed_config_file: deepspeed.json" in printed.stdout
    written = run(*words, "-o", "back.yaml")
    assert (written.exit_code, written.stdout) == (0, "")
    assert written.stderr.split() == ["wrote", "back.yaml", "wrote", "deepspeed.json"]
    assert json.loads(Path("deepspeed.json").read_text()) == {
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0,  # as DeepSpeed means it
    }
    assert import_config("back.yaml").world_size == 4


def test_nothing_is_written_where_something_would_be_left_out(folder: Path) -> None:
    Path("c.toml").write_text('engine = "DDP"\noptimizer = { kind = "AdamW" }\n')
    words = ("export", "c.toml", "--to", "accelerate", "-o", "back.yaml")
    done = run(*words)
    assert (done.exit_code, Path("back.yaml").exists()) == (1, False)
    assert "error export.not-expressible at config.optimizer:" in done.stderr
    partial = run(*words, "--partial")
    assert (partial.exit_code, Path("back.yaml").exists()) == (0, True)
    assert "warning export.not-expressible at config.optimizer:" in partial.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("c.toml", "--to", "axolotl"), "there is no such exporter"),
        (("c.toml", "--to", "accelerate", "-o", "no/such/folder.yaml"), "cannot be written"),
        (("c.yaml", "--to", "accelerate", "-o", "c.yaml"), "is read by this command"),
    ],
)
def test_wrong_use_ends_with_2(folder: Path, words: tuple[str, ...], said: str) -> None:
    Path("c.toml").write_text('engine = "DDP"\n')
    Path("c.yaml").write_text("engine: DDP\n")
    done = run("export", *words)
    assert done.exit_code == 2
    assert said in done.stderr


def test_an_import_that_cannot_be_written_says_all_that_was_found(folder: Path) -> None:
    text = "distributed_type: FSDP\nnum_processes: 2\ndowncast_bf16: true\nfsdp_config:\n  fsdp_version: 2\n"
    Path("acc.yaml").write_text(text)
    done = run("import", "acc.yaml", "-o", "out.ini")
    assert done.exit_code == 1
    assert "import.no-effect" in done.stderr
    assert "config.unknown-extension" in done.stderr


LAUNCHED = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
main_process_ip: 10.0.0.1
num_processes: 8
deepspeed_config:
  zero_stage: 3
  deepspeed_hostfile: hosts
  zero3_save_16bit_model: true
"""


@pytest.mark.parametrize("words", [("import", "-o", "c.toml"), ("export", "--to", "accelerate")])
def test_keys_that_do_not_come_along_are_listed(folder: Path, words: tuple[str, ...]) -> None:
    Path("launched.yaml").write_text(LAUNCHED)
    done = run(words[0], "launched.yaml", *words[1:])
    assert done.exit_code == 0
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("not in "))
    left = line.partition(": ")[2].split(", ")
    assert {f"deepspeed_config.{key}" for key in ("deepspeed_hostfile", "zero3_save_16bit_model")} < {*left}
    assert "main_process_ip" in left
    assert ("compute_environment" in left) is (words[0] == "import"), "which the exporter writes itself"
    Path("plain.toml").write_text('engine = "DDP"\n')
    assert "not in" not in run("export", "plain.toml", "--to", "accelerate").stderr


@pytest.mark.parametrize(
    ("inside", "rule"),
    [
        ({"nosuch": 1}, "unknown-key"),
        ({"bf16": True}, "wrong-type"),
        ({"optimizer": "AdamW"}, "wrong-type"),
        ({"communication_data_type": "bfloat16"}, "wrong-value"),
        ({"zero_optimization": {"stage": 4}}, "stage"),
        ({"amp": {}}, "removed-key"),
    ],
)
@pytest.mark.parametrize("command", [("import",), ("export", "--to", "accelerate")])
def test_a_damaged_json_of_deepspeed_is_refused_also_where_another_file_names_it(
    folder: Path, command: tuple[str, ...], inside: dict, rule: str
) -> None:
    Path("ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}} | inside))
    Path("acc.yaml").write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n")
    for file in ("ds.json", "acc.yaml"):
        done = run(command[0], file, *command[1:])
        assert done.exit_code == 1
        assert f"error deepspeed.{rule} at config.engine" in done.stderr
    Path("ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    assert run(command[0], "acc.yaml", *command[1:]).exit_code == 0
