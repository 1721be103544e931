"""The composite action: each of its steps as a runner would run it, in bash; only GitHub itself is played."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from ruamel.yaml import YAML

from tests.cli.test_revisions import commit, git
from tests.support.command_line import FSDP2_CONFIG, ROOT, workplace

GH = """#!/usr/bin/env bash
# GitHub's API as far as the action asks it: comments are files
for word; do case $word in body=@*) body=${word#body=@};; esac; done
case "$*" in
  *PATCH*) cp "$body" "$COMMENTS/7.md";;
  *POST*) cp "$body" "$COMMENTS/7.md"; echo made >> "$COMMENTS/made";;
  *) [ ! -f "$COMMENTS/7.md" ] || echo 7;;
esac
"""


@frozen
class Runner:
    """A checked-out pull request, and what the runner's expressions stand for."""

    folder: Path
    base: str

    def run(self, **inputs: str) -> dict[str, subprocess.CompletedProcess[str]]:
        """Run every step whose condition holds; by its name."""
        action = YAML(typ="safe").load(ROOT / "action.yml")
        given = {name: str(one.get("default", "")) for name, one in action["inputs"].items()} | inputs | {"install": ""}
        known = {f"inputs.{name}": value for name, value in given.items()}
        known |= {"github.event_name": "pull_request", "github.repository": "ana/train", "github.token": "t"}
        pull = "github.event.pull_request"
        known |= {
            f"{pull}.base.sha": self.base,
            f"{pull}.head.sha": git("rev-parse", "HEAD").strip(),
            f"{pull}.number": "3",
        }
        done = {}
        for step in action["runs"]["steps"]:
            if _holds(step.get("if", ""), known):
                done[step["name"]] = self._step(step, known)
        return done

    def _step(self, step: dict[str, Any], known: dict[str, str]) -> subprocess.CompletedProcess[str]:
        assert "${{" not in step["run"], "what comes from outside reaches the shell in variables alone"
        own = {name: re.sub(r"\$\{\{ (.*?) \}\}", lambda m: known[m[1]], text) for name, text in step["env"].items()}
        places = {
            "RUNNER_TEMP": str(self.folder / ".temp"),
            "GITHUB_STEP_SUMMARY": str(self.folder / ".temp" / "summary.md"),
        }
        path = f"{self.folder / '.temp'}:{os.environ['PATH']}"
        env = {
            **os.environ,
            **own,
            **places,
            "PATH": path,
            "COMMENTS": str(self.folder / ".temp"),
            "PYTHONPATH": f"{ROOT}:{self.folder}",
        }
        command = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"])
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)


def _holds(condition: str, known: dict[str, str]) -> bool:
    """Conditions of the forms that the action has: ``a == 'b' && c != 'd'``."""
    for part in condition.split(" && ") if condition else ():
        name, sign, wanted = re.fullmatch(r"([\w.]+) (==|!=) '(.*)'", part).groups()  # type: ignore[union-attr]
        if (known[name] == wanted) is not (sign == "=="):
            return False
    return True


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{name}_NAME", "ana")
        monkeypatch.setenv(f"{name}_EMAIL", "ana@example.org")
    for folder in workplace(tmp_path, monkeypatch):
        (folder / ".temp").mkdir()
        tools = {"gh": GH, "prepkit": f'#!/usr/bin/env bash\nexec "{sys.executable}" -m prepkit "$@"\n'}
        for name, text in tools.items():
            (folder / ".temp" / name).write_text(text)
            (folder / ".temp" / name).chmod(0o755)
        (folder / ".gitignore").write_text(".temp\n__pycache__\n")
        git("init", "-q", "-b", "main")
        commit()
        yield Runner(folder, git("rev-parse", "HEAD").strip())


def test_the_action_comments_once_and_writes_its_comment_anew(runner: Runner) -> None:
    cluster = "--world-size 8 --per-node 4 --device cuda --batch-size 2"
    for steps in (2, 4):
        (runner.folder / "fsdp2.toml").write_text(f"accumulation = {steps}\n{FSDP2_CONFIG}")
        commit()
        done = runner.run(model="model_of_cli_tests:make", cluster=cluster)
        assert {name: one.returncode for name, one in done.items()} == {"Comment what changed": 0, "Check": 0}, done
    comment = (runner.folder / ".temp" / "7.md").read_text()
    assert "| global batch | 16 | 64 | +300 % |" in comment
    assert (runner.folder / ".temp" / "made").read_text() == "made\n"
    assert (runner.folder / ".temp" / "summary.md").read_text().endswith(comment)


def test_the_action_says_nothing_where_nothing_changed(runner: Runner) -> None:
    (runner.folder / "README.md").write_text("x")
    commit()
    assert runner.run()["Comment what changed"].returncode == 0
    assert not (runner.folder / ".temp" / "7.md").exists()


def test_the_action_is_advice_unless_strict_and_writes_sarif(runner: Runner) -> None:
    (runner.folder / "bad.yaml").write_text("distributed_type: MULTI_GPU\nmixed_precison: bf16\n")
    commit()
    done = runner.run(sarif="prepkit.sarif", paths="bad.yaml")
    assert (done["Check"].returncode, done["Check"].stdout.split("::")[1][:5]) == (0, "error")
    assert json.loads((runner.folder / "prepkit.sarif").read_text())["runs"][0]["results"]
    assert runner.run(strict="true", paths="bad.yaml")["Check"].returncode == 1


def test_what_a_pull_request_says_is_not_run(runner: Runner) -> None:
    done = runner.run(
        paths="$(touch$IFS.temp/run) .", cluster="--device `touch .temp/run`", model="x;touch .temp/run:y"
    )
    assert done["Check"].returncode != 0
    assert not (runner.folder / ".temp" / "run").exists()
