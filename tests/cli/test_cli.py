"""The command line: what it prints where, what it writes, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve

from prepkit import codec
from prepkit.codec.files import save
from prepkit.config import DDP, Config, Mesh
from prepkit.plan import Plan
from tests.support.command_line import FSDP2_CONFIG, MAKE, MODEL, ROOT, run, workplace
from tests.support.fork_server import ForkServers
from tests.support.patience import MOST
from tests.support.plans import ddp_plan
from tests.support.script import run_typed


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from workplace(tmp_path, monkeypatch)


# --- plan ----------------------------------------------------------------------------------------------------------


def test_plan_prints_the_plan(folder: Path) -> None:
    done = run(
        "plan", "fsdp2.toml", *MAKE, "--world-size", "4", "--device", "cuda", "--memory", "80GiB", "--torch", "2.9"
    )
    assert done.exit_code == 0
    assert done.stdout.startswith("FSDP2 plan for 4 ranks\n")
    assert "environment   cuda, 80.00 GiB each, torch 2.9" in re.sub(" {4,}", "   ", done.stdout)
    assert "3 x Block 1.0..2: 4 parameters each" in done.stdout


def test_plan_without_a_cluster_is_for_the_environment_that_is_here(folder: Path) -> None:
    done = run("plan", "single.json", *MAKE)
    assert done.exit_code == 0
    assert done.stdout.startswith("Single plan for 1 rank\n")
    assert "assumed" not in done.stdout


def test_a_saved_plan_is_the_one_that_is_shown(folder: Path) -> None:
    words = ("plan", "fsdp2.toml", *MAKE, "--world-size", "4", "--per-node", "2")
    printed = run(*words).stdout
    saved = run(*words, "-o", "plan.json")
    assert (saved.exit_code, saved.stdout, saved.stderr) == (0, "", "wrote plan.json\n")
    assert run("show", "plan.json").stdout == printed
    assert run("show", "plan.json", "--json").stdout == Path("plan.json").read_text()
    assert "[ST-3, ST-4, ST-16]" in run("show", "plan.json", "--sources").stdout
    assert "ST-3" not in printed


def test_each_world_size_gets_its_file(folder: Path) -> None:
    sizes = ("--world-size", "4", "--world-size", "8", "--world-size", "4")
    done = run("plan", "fsdp2.toml", *MAKE, *sizes, "-o", "plan-{world_size}.json")
    assert (done.exit_code, done.stderr) == (0, "wrote plan-4.json\nwrote plan-8.json\n")
    assert [codec.load_plan(f"plan-{size}.json").world_size for size in (4, 8)] == [4, 8]


def test_several_world_sizes_into_one_file_is_wrong_use(folder: Path) -> None:
    done = run("plan", "fsdp2.toml", *MAKE, "--world-size", "4", "--world-size", "8", "-o", "plan.json")
    assert done.exit_code == 2
    assert "write {world_size} into -o, as in plan-{world_size}.json" in done.stderr
    assert not Path("plan.json").exists()


def test_one_refused_world_size_refuses_all_and_nothing_is_written(folder: Path) -> None:
    sizes = ("--world-size", "3", "--world-size", "4", "--world-size", "5")
    done = run("plan", "fsdp2.toml", *MAKE, *sizes, "-o", "plan-{world_size}.json")
    assert done.exit_code == 1
    assert done.stdout == ""
    assert "world size 3:\nerror mesh.not-world-size at config.mesh (mesh in fsdp2.toml:6:1):" in done.stderr
    assert "world size 5:\nerror mesh.not-world-size at config.mesh (mesh in fsdp2.toml:6:1):" in done.stderr
    assert "world size 4:" not in done.stderr
    assert done.stderr.endswith("no plan was written\n")
    assert not list(folder.glob("plan-*.json"))


def test_a_finding_of_all_world_sizes_is_shown_once(folder: Path) -> None:
    Path("c.toml").write_text(FSDP2_CONFIG.replace("Block", "Blok"))
    done = run("plan", "c.toml", *MAKE, "--world-size", "4", "--world-size", "8")
    assert done.exit_code == 1
    assert done.stderr.count("wrap.class-not-found") == 1
    assert "world size 4, 8:\n" in done.stderr


def test_plan_as_json_holds_the_file_that_would_be_written(folder: Path) -> None:
    words = ("plan", "fsdp2.toml", *MAKE, "--world-size", "4", "--json")
    printed = json.loads(run(*words).stdout)
    run("plan", "fsdp2.toml", *MAKE, "--world-size", "4", "-o", "plan.json")
    plan = json.loads(Path("plan.json").read_text())
    assert printed == {"plans": [{"world_size": 4, "file": None, "plan": plan}], "findings": []}
    written = json.loads(run(*words, "-o", "plan.json").stdout)
    assert written["plans"] == [{"world_size": 4, "file": "plan.json", "plan": None}]


def test_warnings_are_said_when_a_plan_is_written(folder: Path) -> None:
    Path("c.toml").write_text('engine = "Single"\n')
    done = run("plan", "c.toml", *MAKE, "-o", "plan.json")
    assert done.exit_code == 0
    assert done.stderr.startswith("warning optimizer.none at ")
    assert done.stderr.endswith("1 warning\nwrote plan.json\n")


# --- everything at once --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("check",), ("plan",), ("sweep",)])
def test_a_config_without_an_engine_is_told_before_the_model_is_imported(
    command: tuple[str, ...], folder: Path
) -> None:
    Path("c.toml").write_text("engine = 3\naccumulation = 2.0\n")
    done = run(*command, "c.toml", "--model", "model_of_cli_tests:broken", "--world-size", "2")
    assert done.exit_code == 1
    said, silent = (done.stdout, done.stderr) if command == ("check",) else (done.stderr, done.stdout)
    lines = {
        "error codec.wrong-type at c.toml:$.engine (engine in c.toml:1:1):": "c.toml:1:1: error codec.wrong-type:",
        "error codec.wrong-type at c.toml:$.accumulation (accumulation in c.toml:2:1):": "c.toml:2:1: error codec.",
        "note config.unasked at c.toml: ": "c.toml:1:1: note config.unasked: ",
    }
    for text, placed in lines.items():
        assert (placed if command == ("check",) else text) in said
    assert (
        f"then: prepkit check c.toml{' --model model_of_cli_tests:broken' if command != ('sweep',) else ''}\n" in said
    )
    assert said.endswith("2 errors, 1 note\n")
    assert silent == ""


def test_a_slip_in_the_file_hides_no_finding_of_the_rules(folder: Path) -> None:
    text = "engine: {kind: FSDP2, wrap: {kind: WrapClasses, names: [Blok]}}\nacumulation: 0\nlr: 0.1\n"
    Path("c.yaml").write_text(text + "clip: {kind: ClipNorm, max_norm: -1}\ncheckpointing: true\n")
    done = run("check", "c.yaml", *MAKE, "--world-size", "2", "--device", "cpu", "--torch", "2.13", "--json")
    found = {(one["rule"], one["where"], one["origin"]) for one in json.loads(done.stdout)["findings"]}
    assert done.exit_code == 1
    assert found == {
        ("codec.unknown-key", "c.yaml:$.acumulation", "acumulation in c.yaml:2:1"),
        ("codec.unknown-key", "c.yaml:$.lr", "lr in c.yaml:3:1"),
        ("codec.wrong-type", "c.yaml:$.checkpointing", "checkpointing in c.yaml:5:1"),
        ("values.accumulation", "config.accumulation", ""),  # read as what was meant
        ("values.clip", "config.clip.max_norm", "clip.max_norm in c.yaml:4:24"),
        ("wrap.class-not-found", "config.engine.wrap", "engine.wrap in c.yaml:1:23"),
    }  # and nothing of an optimizer that is missing: lr says that there is one
    Path("a.yaml").write_text("distributed_type: FSDP\nnum_processes: 2\nuse_cpu: true\nfsdp_config:\n  zzz: 1\n")
    done = run("check", "a.yaml", *MAKE)
    assert "import.unknown-key" in done.stdout
    assert " warning " in done.stdout
    assert "optimizer.none" not in done.stdout  # a script gives it


def test_a_config_is_checked_by_its_keys_where_no_model_is_given(folder: Path) -> None:
    done = run("check", "fsdp2.toml")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("took fsdp2.toml for prepkit (engine)\n1 file fine")
    Path("c.yaml").write_text("distributed_type: FSDP\nmixed_precision: bf17\n")
    done = run("check", "c.yaml")
    assert done.exit_code == 1
    assert done.stdout.startswith("c.yaml:2:1: error import.wrong-value: ")
    assert done.stderr == "", "check is asked for findings, and they go where a pipe reads them"
    assert json.loads(run("check", "single.json", "--json").stdout)["findings"] == []


@pytest.mark.parametrize("command", [("show",), ("diff", "one.json"), ("rehearse", *MAKE), ("report", "-o", "x.html")])
@pytest.mark.parametrize("name", ["fsdp2.toml", "single.json"])
def test_a_config_in_the_place_of_a_plan_is_called_one(command: tuple[str, ...], name: str, folder: Path) -> None:
    done = run(*command, name)
    assert done.exit_code == 1
    assert f"error codec.foreign at {name}: it is a config" in done.stderr
    assert f"prepkit plan {name} --model PKG.MOD:FACTORY -o plan.json" in done.stderr


@pytest.mark.parametrize("command", ["show", "statement"])
def test_a_statement_in_the_place_of_a_plan_is_called_one(command: str, folder: Path) -> None:
    assert run("plan", "single.json", *MAKE, "-o", "plan.json").exit_code == 0
    Path("st.json").write_text(run("statement", "plan.json").stdout)
    done = run(command, "st.json")
    assert done.exit_code == 1
    assert "error codec.foreign at st.json: it is an in-toto Statement" in done.stderr
    assert "prepkit import" not in done.stderr


def test_help_cuts_no_sentence(folder: Path) -> None:
    assert "..." not in run("--help").stdout.partition("Commands:")[2]


def test_a_model_that_cannot_be_built_says_what_it_raised(folder: Path) -> None:
    Path("c.toml").write_text('engine = "DDP"\n')
    done = run("check", "c.toml", "--model", "model_of_cli_tests:broken", "--world-size", "2")
    assert done.exit_code == 1
    assert "error model.not-built at --model model_of_cli_tests:broken: KeyError: 'no weights here'" in done.stdout
    assert 'python -c "import model_of_cli_tests; model_of_cli_tests.broken()"' in done.stdout
    assert done.stdout.endswith("1 error\n")


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("model_of_cli_tests:mak", "model_of_cli_tests has no 'mak'"),
        ("model_of_cli_tests", "is not an import path"),
        ("model_of_cli_test:make", "there is no module 'model_of_cli_test'"),
        ("model_of_cli_tests:MODEL_TEXT", "has no 'MODEL_TEXT'"),
    ],
)
def test_a_model_path_that_leads_nowhere_is_wrong_use(reference: str, says: str, folder: Path) -> None:
    done = run("check", "single.json", "--model", reference)
    assert done.exit_code == 2
    assert says in done.stderr


def test_an_error_of_the_users_own_factory_is_a_finding_and_names_its_line(folder: Path) -> None:
    done = run("check", "single.json", "--model", "model_of_cli_tests:refusing")
    assert done.exit_code == 1
    assert "ValueError: heads do not divide the width; take 4 (" in done.stdout
    assert f"model_of_cli_tests.py, line {MODEL.splitlines().index('def refusing():') + 2})" in done.stdout


def test_findings_go_to_stdout_as_json(folder: Path) -> None:
    done = run("check", "fsdp2.toml", *MAKE, "--world-size", "3", "--world-size", "4", "--json")
    assert (done.exit_code, done.stderr) == (1, "")
    [found] = json.loads(done.stdout)["findings"]
    places = {"file", "line", "column"}
    assert found.keys() == {"rule", "severity", "where", "what", "fix", "accepted", "origin", "world_sizes", *places}
    assert (found["rule"], found["severity"], found["world_sizes"]) == ("mesh.not-world-size", "error", [3])
    Path("c.toml").write_text("engine = 'DDP'\na = 1\nb = 2\n")
    refused = run("check", "c.toml", *MAKE, "--json")
    assert refused.exit_code == 1
    assert [one["where"] for one in json.loads(refused.stdout)["findings"]][:2] == ["c.toml:$.a", "c.toml:$.b"]


# --- check ---------------------------------------------------------------------------------------------------------


def test_check_says_for_which_sizes_a_plan_exists(folder: Path) -> None:
    done = run("check", "fsdp2.toml", *MAKE, "--world-size", "4", "--world-size", "6")
    assert (done.exit_code, done.stdout.splitlines()[0], done.stderr) == (0, "a plan exists for world size 4, 6", "")
    assert "for certain" in done.stdout


def test_with_a_model_a_finding_stands_at_its_place_too(folder: Path) -> None:
    """Editors and terminals follow it; with one path, with several, and where the file is refused before the model."""
    Path("c.toml").write_text("accumulation = 2\n" + FSDP2_CONFIG.replace("replicate = 2", "replicate = 3"))
    Path("d.yaml").write_text("distributed_type: MULTI_GPU\nmixed_precison: bf16\n")
    words = (*MAKE, "--world-size", "4", "--device", "cuda")
    for paths in (("c.toml",), ("c.toml", "d.yaml")):
        assert re.search(r"^c\.toml:7:1: error mesh\.", run("check", *paths, *words).stdout, re.MULTILINE)
    for paths in (("d.yaml",), ("c.toml", "d.yaml")):
        assert re.search(r"^d\.yaml:2:1: error import\.", run("check", *paths, *words).stdout, re.MULTILINE)


def test_check_shows_errors_that_the_config_accepts_and_does_not_count_them(folder: Path) -> None:
    text = '{"engine": "Single", "optimizer": "SGD", "overrides": ["mesh.single-many-ranks"]}'
    Path("c.json").write_text(text)
    done = run("check", "c.json", *MAKE, "--world-size", "2", "--device", "cpu")
    assert done.exit_code == 0
    assert done.stdout.startswith("accepted in config.overrides:\nc.json:1:1: error mesh.single-many-ranks: ")
    data = json.loads(run("check", "c.json", *MAKE, "--world-size", "2", "--device", "cpu", "--json").stdout)
    assert [(one["rule"], one["accepted"]) for one in data["findings"]] == [("mesh.single-many-ranks", True)]


def test_check_runs_todays_rules_on_the_config_and_facts_in_a_plan_file(folder: Path) -> None:
    assert run("check", "ddp.json").exit_code == 0
    assert "precision.steps-in-16-bit" in run("check", "one.json").stdout
    made = ddp_plan()
    old = evolve(made, config=Config(engine=DDP(bucket_cap_mb=-1.0), mesh=Mesh(replicate=3)))
    save(old, "old.json")
    done = run("check", "old.json")
    assert done.exit_code == 1
    assert "ddp.bucket-size" in done.stdout
    assert "mesh.not-world-size" in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("check", "ddp.json", *MAKE), "is a plan file"),
        (("plan", "ddp.json", *MAKE), "is a plan file"),
        (("check", "ddp.json", "--world-size", "2"), "a plan file carries its environment"),
        (("plan", "fsdp2.toml"), "Missing option '--model'"),
        (("plan", "absent.toml", *MAKE), "does not exist"),
        (("show", "absent.json"), "does not exist"),
        (("show", "."), "is a directory"),
        (("diff", "ddp.json"), "give two files that prepkit wrote, or two revisions"),
        (("plan", "fsdp2.toml", *MAKE, "--memory", "lots"), "'lots' is not a size in bytes"),
        (("plan", "fsdp2.toml", *MAKE, "--world-size", "0"), "0 is not in the range"),
        (("plan", "single.json", *MAKE, "-o", "absent/plan.json"), "cannot be written"),
        (("rehearse", "ddp.json", *MAKE, "--rank", "4"), "ranks 0 to 3"),
        (("rules", "mesh.not-world-siz"), "did you mean 'mesh.not-world-size'?"),
        (("rules", "zzz"), "see: prepkit rules"),
        (("shwo", "ddp.json"), "No such command"),
    ],
)
def test_wrong_use_ends_with_2_and_says_how(words: tuple[str, ...], says: str, folder: Path) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stdout == ""


# --- show, diff, rules, rehearse -----------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("show", "x.json"), ("check", "x.json"), ("diff", "x.json", "ddp.json")])
def test_a_plan_file_that_is_refused_gives_its_findings(words: tuple[str, ...], folder: Path) -> None:
    Path("x.json").write_text(Path("ddp.json").read_text().replace('"replicate"', '"replicat"'))
    done = run(*words)
    assert done.exit_code == 1
    assert "error codec.edited at x.json:$.plan.mesh" in (done.stdout if words[0] == "check" else done.stderr)
    as_json = run(*words, "--json")
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["findings"][0]["rule"] == "codec.edited"


def test_a_plan_may_come_through_a_pipe(folder: Path) -> None:
    said = run("show", "ddp.json").stdout
    text = Path("ddp.json").read_text()
    code = "from prepkit.cli import main; main()"
    for words in (["show", "/dev/stdin"], ["check", "/dev/stdin"], ["diff", "/dev/stdin", "ddp.json"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], input=text, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120 * MOST,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), words
        assert done.stdout == {"show": said, "diff": "the plans are equal\n"}.get(words[0], done.stdout)


def test_a_config_that_can_be_read_once_is_read_once(folder: Path) -> None:
    text = Path("fsdp2.toml").read_text()
    os.mkfifo("piped.toml")
    writer = threading.Thread(target=lambda: Path("piped.toml").write_text(text), daemon=True)
    writer.start()
    done = run("check", "piped.toml", *MAKE, "--world-size", "4")
    assert (done.exit_code, done.stdout.splitlines()[0]) == (0, "a plan exists for world size 4")
    writer.join(timeout=10)


def test_a_diff_of_two_bad_files_speaks_of_both(folder: Path) -> None:
    Path("x.json").write_text("{")
    Path("y.json").write_text('{"kind": "prepkit.plan", "format": 99}')
    done = run("diff", "x.json", "y.json")
    assert done.exit_code == 1
    assert "codec.damaged at x.json:$" in done.stderr
    assert "codec.other-format at y.json:$.format" in done.stderr


def test_a_diff_is_empty_with_0_and_something_with_1(folder: Path) -> None:
    same = run("diff", "ddp.json", "ddp.json")
    assert (same.exit_code, same.stdout) == (0, "the plans are equal\n")
    assert json.loads(run("diff", "ddp.json", "ddp.json", "--json").stdout) == {"changes": []}
    save(evolve(ddp_plan(), config=Config(engine=DDP(bucket_cap_mb=1.0))), "other.json")
    done = run("diff", "ddp.json", "other.json")
    assert done.exit_code == 1
    assert "config.engine.bucket_cap_mb: 25.0 -> 1.0\n" in done.stdout
    data = run("diff", "ddp.json", "other.json", "--json")
    assert data.exit_code == 1
    change = {"kind": "Set", "path": ["config", "engine", "bucket_cap_mb"], "before": 25.0, "after": 1.0}
    assert change in json.loads(data.stdout)["changes"]


def test_rules_lists_all_and_tells_all_about_one() -> None:
    listed = run("rules").stdout.splitlines()
    one = run("rules", "mesh.not-world-size")
    assert (one.exit_code, one.stdout.splitlines()[0]) == (0, "error mesh.not-world-size")
    assert "  example   pk.fits(plan, memory='1MiB')" in run("rules", "memory.exceeds-device").stdout
    data = json.loads(run("rules", "--json").stdout)["rules"]
    assert [line.split()[0] for line in listed] == [rule["id"] for rule in data]
    [about] = json.loads(run("rules", "mesh.not-world-size", "--json").stdout)["rules"]
    assert about in data
    assert (about["overridable"], about["repairs"]) == (False, True)


def test_rules_also_explains_why_a_file_is_refused() -> None:
    page = run("rules", "codec.foreign").stdout
    assert page.startswith("error codec.foreign\n  holds     The file says of itself")
    assert "pk.load" in page
    [about] = json.loads(run("rules", "plan.other-model", "--json").stdout)["rules"]
    assert (about["severity"], about["overridable"], about["repairs"]) == ("error", False, False)


def test_rehearse_runs_the_plan_as_the_rank_asked_for(folder: Path, fork_servers: ForkServers) -> None:
    run("plan", "fsdp2.toml", *MAKE, "--world-size", "4", "-o", "plan.json")
    command = ("-m", "prepkit", "rehearse", "plan.json", *MAKE, "--rank", "3")
    done = run_typed(fork_servers, command, {"PYTHONPATH": str(ROOT)}, folder)
    assert (done.code, done.out.splitlines()[0]) == (0, "rehearsed as rank 3 of 4: as planned"), done.err


def test_a_rehearsal_that_differs_ends_with_1(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prepkit.applying import rehearse as module
    from prepkit.findings import Finding, Severity

    def differs(plan: Plan, model: object, *, rank: int) -> module.Rehearsal:
        what = "dtype planned a, found b"
        wrong = Finding(
            rule="run.other-layout", severity=Severity.ERROR, where="model.embed.weight", what=what, fix="again"
        )
        empty = {"params": (), "units": (), "slots": (), "omitted": ()}
        return module.Rehearsal(rank=rank, world_size=plan.world_size, differences=(wrong,), **empty)

    monkeypatch.setattr(module, "rehearse", differs)
    done = run("rehearse", "fsdp2.json", *MAKE, "--rank", "1")
    assert done.exit_code == 1
    assert done.stdout.startswith("rehearsed as rank 1 of 6: ")
    assert "error run.other-layout at model.embed.weight: dtype planned a, found b\n" in done.stdout
    data = json.loads(run("rehearse", "fsdp2.json", *MAKE, "--json").stdout)
    assert (data["fine"], data["rank"], data["differences"][0]["rule"]) == (False, 0, "run.other-layout")


def test_a_rehearsal_that_cannot_be_held_is_no_finding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prepkit.applying import rehearse as module

    def fails(plan: Plan, model: object, *, rank: int) -> module.Rehearsal:
        raise module.RehearsalFailed("the process died")

    monkeypatch.setattr(module, "rehearse", fails)
    done = run("rehearse", "fsdp2.json", *MAKE)
    assert done.exit_code == 2
    assert "the rehearsal could not be held: the process died" in done.stderr
