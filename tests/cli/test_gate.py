"""``prepkit gate``: its formats as the tools read them, its exit codes, and the baseline."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
from base64 import b85encode
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from xml.etree import ElementTree

import pytest
from ruamel.yaml import YAML

from prepkit.cli import import_and_export as cli_import
from prepkit.cli.gate import MOST_RESULTS, junit, sarif, workflow_commands
from prepkit.findings import Finding, Severity
from prepkit.formats.found import SCRIPTS
from prepkit.formats.places import FilePlace
from tests.support.command_line import MAKE, ROOT, run, workplace

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


def test_thirty_thousand_findings_are_within_every_limit_of_code_scanning() -> None:
    """GitHub, SARIF support: 10 MB compressed, 25,000 results and rules, 20 tags of a rule; 5,000 are shown."""
    draw = random.Random(0)
    noise = b85encode(draw.randbytes(2_000_000)).decode()  # far more than gzip looks back

    def text(length: int) -> str:
        return noise[(at := draw.randrange(len(noise) - length)) : at + length]

    def pair(number: int) -> tuple[FilePlace, Finding]:
        severity = Severity.ERROR if number == 29_999 else Severity.NOTE if number % 2 else Severity.WARNING
        finding = Finding(rule=f"rule.{number % 700}", severity=severity, where="w", what=text(3750), fix=text(3750))
        return FilePlace(f"{number}/{text(188)}", number + 1, 1), finding

    findings = tuple(map(pair, range(30_000)))
    data = sarif(findings)
    (ran,) = data["runs"]
    results, rules = ran["results"], ran["tool"]["driver"]["rules"]
    assert len(gzip.compress(json.dumps(data).encode())) < 10_000_000
    assert (len(results), results[0]["level"]) == (MOST_RESULTS, "error")
    assert {one["level"] for one in results[1:]} == {"warning"}
    assert all(len(one["message"]["text"]) <= 1_000 and " Fix: " in one["message"]["text"] for one in results)
    assert all(rules[one["ruleIndex"]]["id"] == one["ruleId"] for one in results)
    assert len(rules) < 25_000
    assert all(len(rule["properties"]["tags"]) <= 20 for rule in rules)
    (note,) = ran["invocations"][0]["toolExecutionNotifications"]
    assert note["message"]["text"].startswith("25,000 more findings than code scanning shows")
    assert "invocations" not in sarif(findings[:10])["runs"][0]


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
    assert run("gate", "a,b.yaml", "--strict", "--baseline", "/dev/zero").exit_code == 2
    assert run("gate", "--write-baseline").exit_code == 2


LAUNCH = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=4\n"
LINE = "srun torchrun --nproc_per_node 8 train.py\n"


def test_a_baseline_knows_as_many_of_a_kind_as_it_holds(folder: Path) -> None:
    words = ("gate", "run.slurm", "--strict", "--baseline", "known.json")
    (folder / "run.slurm").write_text(LAUNCH + LINE)
    assert run(*words, "--write-baseline").exit_code == 0
    assert "0 new, 1 known" in run(*words).stdout
    (folder / "run.slurm").write_text(LAUNCH + LINE + LINE)
    again = run(*words)
    assert (again.exit_code, "1 new, 1 known" in again.stdout) == (1, True)
    assert "run.slurm:6:" in again.stdout
    assert run(*words, "--write-baseline").exit_code == 0
    (folder / "run.slurm").write_text(LAUNCH + LINE)
    assert "0 new, 1 known" in run(*words).stdout


def test_a_baseline_knows_a_file_however_it_is_spelt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "conf").mkdir()
    (folder / "conf" / "c.yaml").write_text(f"{BAD}gradient_clipping: [\n")
    (folder / "conf" / "d.yaml").write_text(BAD)
    (folder / "a,b.yaml").unlink()
    assert run("gate", "conf", "--baseline", "known.json", "--write-baseline").exit_code == 0
    count = len(json.loads((folder / "known.json").read_text())["known"])
    (folder / "link").symlink_to(folder / "conf")
    for at, spelt, known in (
        (".", "conf", "known.json"),
        (".", "./conf", "known.json"),
        (".", "conf/../conf/", "./known.json"),
        (".", str(folder / "conf"), "known.json"),
        (".", "link", "known.json"),
        ("conf", ".", "../known.json"),
        ("conf", "../conf", str(folder / "known.json")),
    ):
        monkeypatch.chdir(folder / at)
        said = run("gate", spelt, "--baseline", known)
        assert f"0 new, {count} known" in said.stdout, (spelt, said.stdout)


def test_a_baseline_of_before_is_read_and_one_that_is_not_there_is_told(folder: Path) -> None:
    (folder / "conf").mkdir()
    (folder / "conf" / "c.yaml").write_text(BAD)
    words = ("gate", "conf/c.yaml", "--strict", "--baseline", "conf/known.json")
    said = run(*words)
    assert (said.exit_code, said.stderr) == (
        1,
        "there is no conf/known.json, so that nothing is known; --write-baseline writes it\n",
    )
    old = sha256(
        "\0".join(
            (
                "conf/c.yaml",
                "import.unknown-key",
                "conf/c.yaml mixed_precison",
                json.loads(run("gate", "conf/c.yaml", "--format", "json").stdout)["findings"][0]["what"],
            )
        ).encode()
    )
    (folder / "conf" / "known.json").write_text(json.dumps({"known": [old.hexdigest()[:32]]}))
    assert run(*words).exit_code == 0
    assert "wrote conf/known.json, which knows 1 finding" in run(*words, "--write-baseline").stderr


def test_the_hooks_of_pre_commit_check_the_repository_whatever_has_changed(folder: Path) -> None:
    """They are run as pre-commit runs them: in the repository, where a changed file is named as ``files`` says."""
    hooks = YAML(typ="safe").load(ROOT / ".pre-commit-hooks.yaml")
    names = [f"conf/x{suffix}" for suffix in (".yaml", ".yml", ".json", ".toml", *SCRIPTS)]
    (folder / "a,b.yaml").unlink()
    (folder / "workflow.yml").write_text("on: push\n")
    (folder / "conf").mkdir()
    deepspeed = (
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {deepspeed_config_file: conf/ds.json}\n"
    )
    (folder / "acc.yaml").write_text(deepspeed)
    stage = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}'
    for text, codes in ((stage, (0, 0)), (stage.replace("3", "4"), (0, 1))):
        (folder / "conf" / "ds.json").write_text(text)
        for hook, code in zip(hooks, codes, strict=True):
            command, *words = hook["entry"].split()
            assert (command, hook["pass_filenames"], "types_or" in hook) == ("prepkit", False, False)
            assert all(re.search(hook["files"], name) for name in names)
            assert not re.search(hook["files"], "train.py")
            done = run(*words)
            assert (done.exit_code, "conf/ds.json" in done.stdout) == (code, "4" in text), done.output
            assert "workflow.yml" not in done.stdout


# --- exceptions ------------------------------------------------------------------------------------------------------

EXCEPTED = "# prepkit: ignore[import.unknown-key] until 2027-01-01 by ana because it is for a patched accelerate\n"


def _strict(day: str, file: str = "a,b.yaml") -> tuple[int, list[str]]:
    result = run("gate", file, "--strict", "--format", "json", "--on", day)
    return result.exit_code, [one["rule"] for one in json.loads(result.stdout)["findings"]]


def test_an_exception_ends_with_its_day_and_is_told_then(folder: Path) -> None:
    first, second = BAD.splitlines(keepends=True)
    for text in (
        first + EXCEPTED + second,
        f"{first}{second.rstrip()}  {EXCEPTED}",
        f"{first}{EXCEPTED}\n# why\n{second}",
    ):
        (folder / "a,b.yaml").write_text(text)
        assert _strict("2027-01-01") == (0, [])
        assert _strict("2027-01-02") == (1, ["import.unknown-key", "gate.exception-ended"])
    said = run("gate", "a,b.yaml", "--on", "2026-12-31").stdout
    assert "excepted until 2027-01-01 by ana: it is for a patched accelerate (a,b.yaml:2:1)" in said
    assert "0 new, 0 known, 1 excepted" in said


def test_an_exception_is_about_its_rule_and_its_line_alone(folder: Path) -> None:
    for comment in (EXCEPTED.replace("unknown-key", "wrong-value"), f"{EXCEPTED}downcast_bf16: false\n"):
        (folder / "a,b.yaml").write_text(BAD.replace("mixed", f"{comment}mixed"))
        code, rules = _strict("2026-12-31")
        assert (code, rules) == (1, ["import.unknown-key", "gate.exception-unused"])


def test_a_comment_that_is_no_exception_excepts_nothing_and_is_an_error(folder: Path) -> None:
    for comment in (
        "# prepkit: ignore\n",
        EXCEPTED.replace("because", "for"),
        EXCEPTED.replace("2027-01-01", "2027-13-01"),
        EXCEPTED.replace(" until 2027-01-01", ""),
    ):
        (folder / "a,b.yaml").write_text(BAD.replace("mixed", f"{comment}mixed"))
        assert _strict("2026-12-31") == (1, ["import.unknown-key", "gate.exception"])
    (folder / "a,b.yaml").write_text(BAD.replace("mixed", f"{EXCEPTED.replace(' by ana', '')}mixed"))
    assert _strict("2026-12-31") == (0, ["gate.exception-owner"])


def test_an_exception_stands_in_a_comment_and_not_in_a_string(folder: Path) -> None:
    for text, rules in (
        (f'{BAD.replace("bf16", "")[:-1]}"bf16 {EXCEPTED.strip()}"\n', ["import.unknown-key"]),
        (f'{BAD.replace("bf16", "")[:-1]}"bf16" {EXCEPTED}', []),
        (f"{BAD.strip()} // {EXCEPTED[2:]}", ["config.damaged", "config.unasked"]),
        (f"{BAD}# a: [\n{EXCEPTED.replace('unknown-key', 'nknown-key')}main_training_function: main\n", None),
    ):
        (folder / "a,b.yaml").write_text(text)
        assert _strict("2026-12-31")[1] == (["import.unknown-key", "gate.exception-unused"] if rules is None else rules)
    said = run("gate", "a,b.yaml", "--on", "2026-12-31").stdout
    assert "there is no rule import.nknown-key" in said
    assert "fix: Write import.unknown-key." in said


def test_a_file_at_which_prepkit_fails_loses_no_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("boom.yaml", "c.yaml"):
        (folder / name).write_text(BAD)
    read = cli_import.read

    def failing(path: str, kind: str | None) -> object:
        if "boom" in path:
            raise KeyError("flour")
        return read(path, kind)

    monkeypatch.setattr(cli_import, "read", failing)
    done = run("gate", ".", "--format", "json", "--baseline", "known.json")
    found = [(one["file"], one["rule"]) for one in json.loads(done.stdout)["findings"]]
    assert [pair for pair in found if pair[1].startswith(("check", "import"))] == [
        ("boom.yaml", "check.crashed"),
        ("a,b.yaml", "import.unknown-key"),
        ("c.yaml", "import.unknown-key"),
    ]
    assert done.exit_code == 1
    assert "KeyError: 'flour'" in done.stderr
    assert "Traceback" in done.stderr
    assert run("gate", "boom.yaml", "--baseline", "known.json", "--write-baseline").exit_code == 1
    assert not (folder / "known.json").exists()
    checked = run("check", ".")
    assert checked.exit_code == 1
    assert "prepkit itself fails here: KeyError: 'flour'" in checked.stdout
    assert "c.yaml" in checked.stdout


def test_exceptions_are_suppressions_in_sarif_and_skipped_in_junit(folder: Path) -> None:
    (folder / "a,b.yaml").write_text(BAD.replace("mixed", f"{EXCEPTED}mixed"))
    words = ("gate", "a,b.yaml", "--on", "2026-12-31", "--format")
    (result,) = json.loads(run(*words, "sarif").stdout)["runs"][0]["results"]
    assert result["suppressions"][0]["justification"].startswith("excepted until 2027-01-01 by ana")
    suite = ElementTree.fromstring(run(*words, "junit").stdout.encode())
    assert (suite.get("failures"), suite.get("skipped"), suite[0][0].tag) == ("0", "1", "skipped")


def test_annotations_stay_within_what_is_shown(folder: Path) -> None:
    finding = Finding(rule="a.b", severity=Severity.ERROR, where="w", what="x", fix="y")
    lines = workflow_commands(((FilePlace("f", 1, 1), finding),) * 25).splitlines()
    assert (len(lines), lines[-1]) == (10, "::error title=prepkit::and 16 more: prepkit gate --format text")


def test_junit_is_xml_whatever_a_file_holds(folder: Path) -> None:
    bad = Finding(rule="a.b", severity=Severity.ERROR, where="w", what='\x00<&"\ud800\uffff]]>', fix="y")
    suite = ElementTree.fromstring(junit(((FilePlace("f\x01", 1, 1), bad),)).encode())
    assert suite[0].get("name") == "f\ufffd:1:1"


def test_sarif_is_what_the_schema_of_oasis_takes(folder: Path) -> None:
    """``PREPKIT_SARIF_SCHEMA`` names that file (oasis-tcs/sarif-spec), which is not kept here for its licence."""
    file = os.environ.get("PREPKIT_SARIF_SCHEMA")
    jsonschema = pytest.importorskip("jsonschema")
    if not file:
        pytest.skip("PREPKIT_SARIF_SCHEMA names no schema")
    (folder / "one.yaml").write_text(BAD.replace("mixed", f"{EXCEPTED}mixed"))
    (folder / "ä b.yaml").write_text(BAD)
    schema = json.loads(Path(file).read_text())
    data = json.loads(run("gate", ".", "--format", "sarif", "--on", "2026-12-31").stdout)
    assert len(data["runs"][0]["results"]) >= 3
    jsonschema.Draft7Validator(schema, format_checker=jsonschema.FormatChecker()).validate(data)
    data["runs"][0]["results"][0]["level"] = "bad"
    assert not jsonschema.Draft7Validator(schema).is_valid(data)


def test_a_finding_about_an_imported_plan_is_in_the_plan_that_is_gated(folder: Path) -> None:
    """Annotations about a file that is not in the pull request are shown nowhere."""
    (folder / "acc.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n"
    )
    assert run("plan", "acc.yaml", *MAKE, "--device", "cuda", "-o", "plan.json").exit_code == 0
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["plan"]["config"]["origins"]
    found = json.loads(run("gate", "plan.json", "--format", "json").stdout)["findings"]
    assert [one["rule"] for one in found if one["origin"]]
    assert {one["file"] for one in found} == {"plan.json"}
    for one in found:
        if one["where"].startswith("config."):
            line = (folder / "plan.json").read_text().splitlines()[one["line"] - 1]
            assert f'"{one["where"].rpartition(".")[2]}"' in line
    assert "acc.yaml:" in run("gate", "plan.json").stdout
