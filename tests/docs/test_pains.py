"""Every pain and wish on the page has an answer that exists and a test that is there, and none is left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import prepkit as pk
from tests.test_behaviour_rows import existing

PAGE = Path(__file__).parents[2] / "docs" / "pains.md"
CODE = re.compile(r"`([^`]+)`")


def ids(answers: list[str]) -> list[str]:
    """What is written as the id of a rule or refusal: ``area.name``, but for fields of the config."""
    areas = {one.partition(".")[0] for one in existing()["rule"]} - {"config"}
    codes = (code for answer in answers for code in CODE.findall(answer))
    return [one for one in codes if re.fullmatch(rf"({'|'.join(areas)})\.[a-z0-9-]+", one)]


def rows(kind: str) -> dict[int, tuple[str, str]]:
    """Number to answer and tests, of the table whose first column is called so."""
    lines = PAGE.read_text(encoding="utf-8").split(f"| {kind} |")[1].partition("\n## ")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {int(number): (answer, tests) for number, _, answer, tests in cells}


@pytest.mark.parametrize(("kind", "count"), [("pain", 40), ("wish", 25)])
def test_every_pain_and_wish_is_there_once_and_its_test_is_written(kind: str, count: int) -> None:
    table, tests = rows(kind), existing()["test"]
    assert list(table) == list(range(1, count + 1))
    assert [number for number, (_, named) in table.items() if not set(CODE.findall(named)) & tests] == []
    assert [one for _, named in table.values() for one in CODE.findall(named) if one not in tests] == []


@pytest.mark.parametrize("kind", ["pain", "wish"])
def test_every_rule_step_and_class_that_answers_exists(kind: str) -> None:
    known = existing()
    named = [code for answer, _ in rows(kind).values() for code in CODE.findall(answer)]
    assert [one for one in ids([answer for answer, _ in rows(kind).values()]) if one not in known["rule"]] == []
    classes = [one for one in named if re.fullmatch(r"[A-Z]\w+", one)]
    assert [one for one in classes if one not in known["step"] and not hasattr(pk, one)] == []
    calls = [one.removeprefix("pk.") for one in named if re.fullmatch(r"pk\.\w+", one)]
    assert [one for one in calls if not hasattr(pk, one)] == []


def test_an_answer_is_a_rule_a_step_a_page_or_says_what_is_left_open() -> None:
    answers = {(kind, number): answer for kind in ("pain", "wish") for number, (answer, _) in rows(kind).items()}
    assert [
        row for row, answer in answers.items() if not (CODE.search(answer) or "](" in answer or len(answer) > 20)
    ] == []
    assert len(set(ids(list(answers.values())))) > 40, "the walk sees the ids"
