"""The attestation: saved beside the plan, sealed like it, and compared months later."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve

from prepkit.codec.diff import diff, patch, place
from prepkit.codec.files import attestation_from_text, attestation_to_text, load, save
from prepkit.facts import Env
from prepkit.findings import Finding, PlanRejected, Severity
from prepkit.plan.attestation import Asked, Attestation
from prepkit.plan.drift import Drift
from tests.support.command_line import run, workplace
from tests.support.sample_plan import sample_plan

HERE = Env(world_size=2, device="cpu", torch="2.13.0")
FOUND = Attestation(
    plan="sha256:12",
    made=sample_plan().provenance,
    overridden=("optimizer.foreign-parameters",),
    env=HERE,
    drift=(Drift(nature="note", where="facts.env.torch", planned="2.9", now="2.13.0"),),
    rank=1,
    asked=(Asked(rule="run.other-layout", moment="after apply"),),
)

TORN = Asked(
    rule="run.tie-broken",
    moment="after apply",
    found=(Finding(rule="run.tie-broken", severity=Severity.ERROR, where="model", what="two", fix="tie"),),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from workplace(tmp_path, monkeypatch)


def refused(text: str) -> list[tuple[str, str]]:
    with pytest.raises(PlanRejected) as caught:
        attestation_from_text(text)
    return [(found.rule, found.where) for found in caught.value.findings]


def test_a_saved_attestation_is_loaded_as_it_was(tmp_path: Path) -> None:
    save(FOUND, str(tmp_path / "seen.json"))
    assert load(tmp_path / "seen.json") == FOUND
    assert json.loads((tmp_path / "seen.json").read_text())["kind"] == "prepkit.attestation"


def test_it_says_what_held_what_did_not_and_what_drifted() -> None:
    assert str(FOUND).splitlines()[:2] == ["1 rules hold", "drift since the plan was made:"]
    bad = evolve(FOUND, asked=(*FOUND.asked, TORN), drift=())
    assert str(bad) == "1 of 2 rules do not hold:\n  run.tie-broken at model: two"
    assert evolve(bad, overridden=("run.tie-broken",)).failed == ()


@pytest.mark.parametrize(
    ("key", "value", "rule", "where"),
    [
        ("kind", "prepkit.plan", "codec.foreign", "$"),
        ("format", 2, "codec.other-format", "$.format"),
        ("format", True, "codec.other-format", "$.format"),
        ("digest", "sha256:0", "codec.edited", "$.digest"),
        ("more", 1, "codec.wrong-keys", "$.more"),
    ],
)
def test_a_file_that_is_not_whole_is_refused_with_the_place(key: str, value: object, rule: str, where: str) -> None:
    data = json.loads(attestation_to_text(FOUND))
    assert refused(json.dumps({**data, key: value})) == [(rule, where)]


def test_a_check_that_was_edited_to_hold_is_refused() -> None:
    bad = evolve(FOUND, asked=(TORN,))
    text = attestation_to_text(bad)
    assert refused(text.replace('"severity": "error"', '"severity": "note"')) == [("codec.edited", "$.digest")]


def test_two_runs_are_compared_and_one_is_patched_to_the_other() -> None:
    later = evolve(FOUND, env=evolve(HERE, torch="2.14.0"), overridden=())
    changes = diff(FOUND, later)
    assert sorted(place(change.path) for change in changes) == ["env.torch", "overridden"]
    assert patch(FOUND, changes) == later
    assert diff(FOUND, FOUND) == ()


def test_the_command_line_shows_and_compares_attestations(folder: Path) -> None:
    save(FOUND, "monday.json")
    save(evolve(FOUND, env=evolve(HERE, torch="2.14.0")), "friday.json")
    assert run("show", "monday.json").stdout == f"{FOUND}\n"
    assert run("show", "monday.json", "--json").stdout == Path("monday.json").read_text()
    same = run("diff", "monday.json", "monday.json")
    assert (same.exit_code, same.stdout) == (0, "the attestations are equal\n")
    other = run("diff", "monday.json", "friday.json")
    assert (other.exit_code, other.stdout) == (1, "env.torch: '2.13.0' -> '2.14.0'\n1 difference\n")


def test_a_plan_and_an_attestation_are_not_compared(folder: Path) -> None:
    save(FOUND, "seen.json")
    done = run("diff", "ddp.json", "seen.json")
    assert done.exit_code == 2
    assert "one is a plan, the other an attestation; compare two of a kind" in done.stderr
