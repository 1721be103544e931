"""Names from files and models, as they are printed."""

from __future__ import annotations

import pytest
from attrs import evolve

import prepkit as pk
from prepkit.config import Config
from prepkit.findings import Finding, Severity
from prepkit.planner import plan
from prepkit.testing.tiny import tiny_facts

MOVES = "\x1b[2J\x1b]0;owned\x07"


def test_no_name_in_a_plan_or_a_finding_moves_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    found = Finding(rule="run.nan", severity=Severity.WARNING, where=f"model.{MOVES}", what=MOVES, fix=MOVES)
    made = evolve(plan(Config(), tiny_facts()).unwrap(), warnings=(found,))
    for value in (made, (found,)):
        pk.show(value)
        print(made, found)
    said = capsys.readouterr().out
    assert "\\x1b[2J" in said
    assert not {"\x1b", "\x07"} & set(said)
