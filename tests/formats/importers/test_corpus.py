"""Config files that people have: each becomes a config or findings, and every key of it is accounted for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.corpus import JUSTIFIED, Row, examined, main, rows, table

FOUND = tuple(rows())


@pytest.mark.skipif(not FOUND, reason="the folder of collected configs is not beside the project")
@pytest.mark.parametrize("row", FOUND, ids=lambda row: row.file[-60:])
def test_each_file_becomes_a_config_or_justified_findings(row: Row) -> None:
    assert not row.unexplained
    assert row.findings or row.keys


@pytest.mark.skipif(not FOUND, reason="the folder of collected configs is not beside the project")
def test_every_reason_stands_for_some_file() -> None:
    assert {rule for row in FOUND if row.accepted for rule in row.errors} == JUSTIFIED.keys()


def folder(tmp_path: Path, text: str) -> Path:
    (tmp_path / "index.csv").write_text("file,kind,accelerate_ok,deepspeed_ok\none.yaml,accelerate,true,\n")
    (tmp_path / "one.yaml").write_text(text)
    return tmp_path


def test_the_table_counts_files_rules_and_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder(tmp_path, "distributed_type: MULTI_GPU\nnum_processes: 2\ndebug: false\n"))]) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["accelerate", "config", "1"] in said
    assert {("accelerate", "setting", "1"), ("accelerate", "declared", "1")} <= set(map(tuple, said))
    assert said[-1] == ["unexplained:", "0"]


def test_a_refusal_without_a_reason_is_unexplained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder(tmp_path, "distributed_type: MULTI_GPU\nnum_proceses: 2\n"))]) == 1
    assert "one.yaml: refused by import.unknown-key" in capsys.readouterr().out


def test_a_key_that_is_read_and_lost_is_unexplained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.tools.corpus.SILENT", {})
    row = next(rows(folder(tmp_path, "distributed_type: MULTI_GPU\nuse_cpu: false\n")))
    assert row.unexplained == ("key use_cpu",)
    assert "unexplained: 1" in table([row])


def test_a_key_counts_under_the_name_that_the_file_gives_it(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nfsdp_config: {sharding_strategy: 2, transformer_layer_cls_to_wrap: Block}\n"
    row = next(rows(folder(tmp_path, f"{text}dynamo_config: {{backend: inductor, use_regional_compilation: true}}\n")))
    assert row.unexplained == ()
    assert {said for _, said in row.keys} == {"setting", "finding"}


def test_a_crash_is_unexplained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.tools.corpus.import_config", lambda path: {}["no such key"])
    row = examined(tmp_path / "one.yaml", "one.yaml", "accelerate")
    assert (row.outcome, row.unexplained) == ("crash", ("KeyError: 'no such key'",))


def test_a_folder_without_files_is_used_wrongly(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 2
