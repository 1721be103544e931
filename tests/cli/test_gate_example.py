"""``examples/gate``: a repository with config, policy, hook and CI job, by the commands of ``docs/howto/ci.md``."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from prepkit.codec.files import save
from prepkit.formats.policy import read_policies
from tests.cli.test_revisions import commit, git
from tests.support.command_line import ROOT, run
from tests.support.plans import fsdp2_plan

SAMPLE = ROOT / "examples" / "gate"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(SAMPLE, tmp_path / "gate")
    monkeypatch.chdir(tmp_path / "gate")
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{name}_NAME", "ana")
        monkeypatch.setenv(f"{name}_EMAIL", "ana@example.org")
    return tmp_path / "gate"


def test_the_sample_passes_its_gate_until_its_exception_ends(folder: Path) -> None:
    said = run("gate", ".", "--strict", "--on", "2026-12-31")
    assert (said.exit_code, "0 new, 0 known, 1 excepted" in said.stdout) == (0, True), said.output
    said = run("gate", ".", "--strict", "--policy", "policy.toml", "--on", "2026-12-31")
    assert (said.exit_code, "policy.unasked: no plan was judged" in said.stdout) == (1, True), said.output
    save(fsdp2_plan(), "plan.json")
    said = run("gate", ".", "--strict", "--policy", "policy.toml", "--on", "2026-12-31")
    assert (said.exit_code, "unasked" in said.stdout) == (0, False), said.output
    assert "has ended on 2027-01-01" in run("gate", ".", "--on", "2027-01-02").stdout
    assert [one.id for one in read_policies(("policy.toml",)).thresholds] == ["ours.memory", "ours.engine"]


def test_its_hook_and_its_job_name_what_this_repository_has(folder: Path) -> None:
    yaml = YAML(typ="safe")
    ours = {hook["id"] for hook in yaml.load(ROOT / ".pre-commit-hooks.yaml")}
    (repo,) = yaml.load(folder / ".pre-commit-config.yaml")["repos"]
    assert {hook["id"] for hook in repo["hooks"]} <= ours
    inputs = yaml.load(ROOT / "action.yml")["inputs"]
    (job,) = yaml.load(folder / ".github" / "workflows" / "prepkit.yml")["jobs"].values()
    assert set(job["steps"][-1]["with"]) <= set(inputs)


def test_its_pull_request_has_the_comment_that_is_shown(folder: Path) -> None:
    git("init", "-q", "-b", "main")
    commit()
    config = (folder / "prepkit.toml").read_text()
    (folder / "prepkit.toml").write_text(
        config.replace("accumulation = 4", "accumulation = 8").replace("shard = 8", "shard = 16")
    )
    commit()
    comment = run("diff", "HEAD~1...HEAD", "--comment").stdout
    assert re.sub("HEAD~1", "main", comment) == (folder / "comment.md").read_text()
