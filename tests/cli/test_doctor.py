"""``prepkit doctor``: what is installed, what is wrong with it, and which rules cannot be asked here."""

from __future__ import annotations

import json
from importlib import metadata
from typing import Any

import pytest

from prepkit.cli import doctor
from prepkit.rules import LAW
from prepkit.rules.rule import Moment, Need
from tests.cli.test_without_torch import WALL
from tests.support.command_line import fresh, run


def _with_versions(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, real(name)))
    monkeypatch.setattr(doctor, "_requirements", lambda: ["torch>=2.6; extra == 'torch'", "attrs>=24.2", "no version"])


def _said() -> tuple[int, dict[str, Any]]:
    done = run("doctor", "--json")
    return done.exit_code, json.loads(done.stdout)


def test_one_screen_says_what_is_here_and_what_cannot_be_known() -> None:
    done = run("doctor")
    lines = done.stdout.splitlines()
    assert done.exit_code == 0, done.stdout
    assert len(lines) <= 24
    assert f"torch {metadata.version('torch')}" in lines[1]
    assert any(line.startswith(("device: cpu, ", "device: cuda:0 ")) for line in lines)
    assert "cannot know here:" in lines
    assert any("what the other ranks have seen" in line and "--torchrun 2" in line for line in lines)


def test_every_rule_that_waits_for_objects_is_named_with_what_it_waits_for() -> None:
    code, data = _said()
    waits = {rule: one["what"] for one in data["cannot_know"] for rule in one["rules"]}
    later = {rule.id for rule in LAW if not rule.told_by and not {Moment.PLAN, Moment.PLANNED} & set(rule.at)}
    ranks = {rule.id for rule in LAW if rule.id in later and Need.RANKS in rule.needs}
    assert code == 0
    assert later <= set(waits)
    assert not {rule.id for rule in LAW if rule.told_by and Moment.PLAN not in rule.at} & set(waits)
    assert {rule for rule, what in waits.items() if what == "what the other ranks have seen"} == ranks
    assert all(one["tells"] for one in data["cannot_know"])


def test_without_torch_whatever_needs_it_is_not_known_and_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_versions(monkeypatch, torch=None)
    code, data = _said()
    (unknown,) = [one for one in data["cannot_know"] if one["what"] == "torch"]
    assert (code, data["devices"], data["wrong"]) == (0, [], [])
    assert "torch" in data["not_installed"]
    assert unknown["tells"] == "type: pip install 'prepkit[torch]'"
    assert len(unknown["rules"]) > 150


def test_a_rule_that_finds_something_here_is_not_counted_as_one_that_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    fine = _said()[1]["rules_that_hold"]
    monkeypatch.setenv("SLURM_NTASKS", "7")
    data = _said()[1]
    (one,) = data["wrong"]
    assert "SLURM started 7 tasks" in one["what"]
    assert data["rules_that_hold"] == fine - 1


def test_a_library_that_is_too_old_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, wrong in (("2.5.1", ["machine.library-too-old"]), ("2.6.0", []), ("2.10.0+cpu", [])):
        _with_versions(monkeypatch, torch=version)
        code, data = _said()
        assert (code, [one["rule"] for one in data["wrong"]]) == (1 if wrong else 0, wrong)


def test_a_torch_that_cannot_be_imported_is_wrong_and_ends_nothing() -> None:
    done = fresh("doctor", prelude=WALL)
    assert done.returncode == 1, done.stderr
    assert "machine.torch-broken" in done.stdout
    assert "cannot know here:" in done.stdout
