"""``prepkit gate``: its formats as the tools read them, its exit codes, and the baseline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from ruamel.yaml import YAML

from prepkit.cli.gate import MOST_RESULTS, sarif
from prepkit.findings import Finding, Severity
from prepkit.formats.places import FilePlace
from tests.support.command_line import ROOT, run, workplace

BAD = "distributed_type: MULTI_GPU\nmixed_precison: bf16\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for inside in workplace(tmp_path, monkeypatch):
        (inside / "a,b.yaml").write_text(BAD)
        yield inside


def test_findings_are_advice_unless_strict_is_asked_for(folder: Path) -> None:
    assert run("gate", "a,b.yaml").exit_code == 0
    assert run("gate", "a,b.yaml", "--strict").exit_code == 1
    (folder / "a,b.yaml").write_text(BAD.replace("precison", "precision"))
    assert run("gate", "a,b.yaml", "--strict").exit_code == 0
    assert run("gate", "absent.yaml").exit_code == 2


def test_sarif_has_what_its_schema_asks_for(folder: Path) -> None:
    data = json.loads(run("gate", "a,b.yaml", "--format", "sarif").stdout)
    (ran,) = data["runs"]
    (result,) = ran["results"]
    assert (data["version"], ran["tool"]["driver"]["name"]) == ("2.1.0", "prepkit")
    assert ran["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "import.unknown-key"
    assert result["level"] in ("none", "note", "warning", "error")
    assert result["message"]["text"]
    assert result["locations"][0]["physicalLocation"] == {
        "artifactLocation": {"uri": "a,b.yaml"},
        "region": {"startLine": 2, "startColumn": 1},
    }


def test_sarif_keeps_errors_within_the_limit_of_code_scanning() -> None:
    def finding(severity: Severity) -> Finding:
        return Finding(rule="a.b", severity=severity, where="w", what="x", fix="y")

    many = ((FilePlace("f", 1, 1), finding(Severity.WARNING)),) * MOST_RESULTS
    results = sarif((*many, (FilePlace("f", 2, 1), finding(Severity.ERROR))))["runs"][0]["results"]
    assert len(results) == MOST_RESULTS
    assert results[0]["level"] == "error"


def test_annotations_junit_and_json_name_the_place(folder: Path) -> None:
    said = run("gate", "a,b.yaml", "--format", "github").stdout
    assert said.startswith("::error file=a%2Cb.yaml,line=2,col=1,title=import.unknown-key::")
    suite = ElementTree.fromstring(run("gate", "a,b.yaml", "--format", "junit").stdout.encode())
    assert (suite.get("failures"), [case.get("name") for case in suite]) == ("1", ["a,b.yaml:2:1"])
    (one,) = json.loads(run("gate", "a,b.yaml", "--format", "json").stdout)["findings"]
    assert (one["file"], one["line"], one["column"]) == ("a,b.yaml", 2, 1)


def test_a_baseline_forgives_what_it_knows_and_nothing_else(folder: Path) -> None:
    words = ("gate", "a,b.yaml", "--strict", "--baseline", "known.json")
    assert run(*words).exit_code == 1
    assert run(*words, "--write-baseline").exit_code == 0
    (folder / "a,b.yaml").write_text(f"# moved\n{BAD}")
    assert run(*words).exit_code == 0
    (folder / "a,b.yaml").write_text(f"{BAD}downcast_bf17: true\n")
    assert run(*words).exit_code == 1
    (folder / "known.json").write_text("[]")
    assert run(*words).exit_code == 2
    assert run("gate", "--write-baseline").exit_code == 2


def test_the_hooks_of_pre_commit_run_and_pass_by_what_is_no_config(folder: Path) -> None:
    hooks = {hook["id"]: hook["entry"].split() for hook in YAML(typ="safe").load(ROOT / ".pre-commit-hooks.yaml")}
    (folder / "workflow.yml").write_text("on: push\n")
    codes = {}
    for name, (command, *words) in hooks.items():
        assert command == "prepkit"
        codes[name] = [run(*words, file).exit_code for file in ("a,b.yaml", "workflow.yml")]
    assert codes == {"prepkit-check": [0, 0], "prepkit-gate": [1, 0]}
