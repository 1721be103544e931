"""No row of the behaviour reference is skipped silently: each has an answer that exists, or a reason against it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping, Set
from functools import cache
from itertools import chain
from pathlib import Path
from typing import get_args

import pytest

from prepkit.rules import LAW
from prepkit.steps import Step
from tests.docs import behaviour
from tests.support import behaviour_rows
from tests.support.behaviour_rows import ROWS, TABLES
from tests.support.behaviour_rows.settings import SETTINGS_OF
from tests.support.settings import SETTINGS

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT.parent / "shared" / "behaviour.md"
NOT_OURS = ("HD",)
"""Areas without behaviour: in what an unpublished state of accelerate is older than its release."""

CELL = re.compile(r"(?m)^(?:\| )?((?:[A-Z]+|[A-Z]\d)-)([A-Z]*)(\d+)([a-z]?)(?:[\u2013/](\d+))?\b")
"""The id that a row or paragraph begins with; ``K-DS6/7``, or a dash for the ``/``, means all ids in between."""


def reference() -> list[str]:
    """Ids of all rows of the reference, in their order."""
    if not REFERENCE.is_file():
        pytest.skip(f"the behaviour reference is not at {REFERENCE}")
    return [
        f"{area}{family}{number}{letter}"
        for area, family, first, letter, last in CELL.findall(REFERENCE.read_text(encoding="utf-8"))
        if area[:-1] not in NOT_OURS
        for number in range(int(first), int(last or first) + 1)
    ]


@cache
def written() -> Mapping[str, list[str]]:
    """Name of every test function, to the files that have one of it."""
    found: dict[str, list[str]] = {}
    for path in (path for folder in ("tests", "property_tests") for path in sorted((ROOT / folder).rglob("test_*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    return found


@cache
def existing() -> Mapping[str, Set[str]]:
    """What an answer of each kind may name."""
    return {
        "rule": {rule.id for rule in LAW},
        "step": {kind.__name__ for kind in get_args(Step)},
        "test": set(written()),
        "row": set(ROWS),
    }


def answered_by(row: str, seen: tuple[str, ...] = ()) -> list[str]:
    """The answers of a row, and in the place of other rows theirs. A circle of rows ends in nothing."""
    parts = [answer.partition(" ")[::2] for answer in ROWS[row]]
    return [
        answer
        for kind, said in parts
        for answer in (
            answered_by(said, (*seen, row))
            if kind == "row" and said not in seen
            else [f"{kind} {said}"] * (kind != "row")
        )
    ]


def pending() -> dict[str, list[str]]:
    """Rows that still wait for a subject, by subject."""
    waiting: dict[str, list[str]] = {}
    for row, answers in ROWS.items():
        for answer in answers:
            if answer.startswith("pending "):
                waiting.setdefault(answer.removeprefix("pending ").partition(":")[0], []).append(row)
    return waiting


def test_every_row_of_the_reference_is_in_the_table_and_no_other() -> None:
    found = reference()
    assert len(found) == len(set(found)) == 605
    assert sorted(set(found) - set(ROWS)) == []
    assert sorted(set(ROWS) - set(found)) == []


def test_every_answer_names_a_rule_a_step_or_a_test_that_exists_or_gives_a_reason() -> None:
    known = existing()
    wrong = [
        f"{row}: {answer}"
        for row, answers in ROWS.items()
        for answer in answers
        for kind, _, said in [answer.partition(" ")]
        if (said not in known[kind] if kind in known else kind not in ("deviation", "pending") or len(said) < 5)
    ]
    assert wrong == []


def test_a_cited_test_is_one_test_in_one_file() -> None:
    where = written()
    cited = {
        said for answers in ROWS.values() for kind, _, said in (one.partition(" ") for one in answers) if kind == "test"
    }
    assert {name: files for name in sorted(cited) if len(files := where.get(name, [])) != 1} == {}


def test_every_setting_that_a_row_is_about_is_proven_from_the_config() -> None:
    proven = {setting.name for setting in SETTINGS}
    assert sorted(set(SETTINGS_OF) - set(ROWS)) == []
    assert {row: missing for row, names in SETTINGS_OF.items() if (missing := set(names) - proven)} == {}


def test_every_row_says_what_accelerate_does() -> None:
    assert list(behaviour.REFERENCE) == list(ROWS)


def test_every_deviation_is_on_the_page_that_users_have() -> None:
    page = (ROOT / "docs" / "deviations.md").read_text(encoding="utf-8")
    assert [row for row in behaviour.deviating() if f"\n| {row} | " not in page] == []


def test_a_row_that_points_to_others_ends_at_an_answer() -> None:
    assert [row for row in ROWS if not answered_by(row)] == []


def test_what_is_left_is_said() -> None:
    """Prints it (``pytest -s``). Whoever builds a subject takes its rows out of the table's ``pending``."""
    waiting = pending()
    for subject, rows in sorted(waiting.items()):
        print(f"pending {subject}: {len(rows)} rows: {', '.join(rows)}")
    print(f"{len(set(chain.from_iterable(waiting.values())))} of {len(ROWS)} rows are pending")
    assert len(set(chain.from_iterable(waiting.values()))) <= MOST_PENDING


MOST_PENDING = 0
"""Rows that wait today; the number only goes down."""


def test_no_row_stands_in_two_blocks_of_the_table() -> None:
    counted = Counter(row for table in TABLES for row in table)
    assert [row for row, count in counted.items() if count > 1] == []
    assert len(counted) == len(ROWS)


def test_every_block_is_in_the_table() -> None:
    files = [module for module in vars(behaviour_rows).values() if getattr(module, "__package__", "").endswith("_rows")]
    blocks = [table for module in files for table in vars(module).values() if isinstance(table, dict)]
    rows = set(
        chain.from_iterable(block for block in blocks if all(isinstance(row, str) and "-" in row for row in block))
    )
    assert rows == set(ROWS)
