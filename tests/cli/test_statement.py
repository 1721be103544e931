"""``prepkit statement``: an attestation as an in-toto Statement, signed and verified by stock tools."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from prepkit.codec.files import save
from tests.plan.test_attestation import FOUND
from tests.support.command_line import run, workplace


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for inside in workplace(tmp_path, monkeypatch):
        save(FOUND, "attestation.json")
        yield inside


def test_a_statement_names_its_subjects_by_digests_and_says_what_was_asked(folder: Path) -> None:
    result = run("statement", "attestation.json", "-o", "statement.json")
    data = json.loads((folder / "statement.json").read_text())
    assert result.exit_code == (1 if FOUND.failed else 0)
    assert data["_type"] == "https://in-toto.io/Statement/v1"
    assert data["predicate"]["holds"] is not bool(FOUND.failed)
    assert [one["rule"] for one in data["predicate"]["checks"]] == [one.rule for one in FOUND.asked]
    for subject in data["subject"]:
        assert set(subject["digest"]) == {"sha256"}
        assert ":" not in subject["digest"]["sha256"]
    of_plan = json.loads(run("statement", "ddp.json").stdout)
    assert (of_plan["predicateType"], of_plan["predicate"]["engine"]) == ("https://prepkit.dev/plan/v1", "DDP")
    assert list(of_plan["predicate"]) == ["prepkit", "engine", "precision", "world_size", "warnings", "overridden"]
    assert [of_plan["predicate"][name] for name in ("precision", "world_size", "overridden")] == ["None", 4, []]
    assert run("statement", "fsdp2.toml").exit_code == 1


def test_ssh_keygen_signs_it_and_refuses_one_that_was_changed_or_signed_by_another(folder: Path) -> None:
    run("statement", "attestation.json", "-o", "statement.json")
    for name in ("ana", "eve"):
        _ssh("-q", "-t", "ed25519", "-N", "", "-f", name)
    (folder / "signers").write_text(f"ana {(folder / 'ana.pub').read_text()}")

    def verified() -> bool:
        command = ("-Y", "verify", "-f", "signers", "-I", "ana", "-n", "prepkit", "-s", "statement.json.sig")
        return _ssh(*command, given=(folder / "statement.json").read_text()) == 0

    for name, holds in (("ana", True), ("eve", False)):
        (folder / "statement.json.sig").unlink(missing_ok=True)
        assert _ssh("-q", "-Y", "sign", "-f", name, "-n", "prepkit", "statement.json") == 0
        assert verified() is holds
    (folder / "statement.json.sig").unlink()
    _ssh("-q", "-Y", "sign", "-f", "ana", "-n", "prepkit", "statement.json")
    (folder / "statement.json").write_text((folder / "statement.json").read_text().replace("rank", "Rank"))
    assert not verified()


def _ssh(*words: str, given: str = "") -> int:
    return subprocess.run(("ssh-keygen", *words), input=given, text=True, capture_output=True, check=False).returncode
