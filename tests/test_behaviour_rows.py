"""No row of the behaviour reference is skipped silently: each has an answer that exists, or a reason against it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from prepkit.rules import RULES
from prepkit.steps import Step
from tests.support import behaviour_rows
from tests.support.behaviour_rows import ROWS

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT.parent / "shared" / "behaviour.md"
SECTIONS = ("1", "3", "4", "5", "6")
AREAS = (
    "ST",
    "BK",
    "DM",
    "AMP",
    "TE",
    "Q",
    "PL",
    "EV",
    "DDP",
    "TP",
    "FR",
    "F1",
    "P2",
    "M2",
    "MC",
    "XL",
    "CM",
    "H",
    "DS",
    "DP",
    "HC",
)


def reference() -> list[str]:
    """Ids of the rows of the sections, in their order: first cells of tables, and words that begin a paragraph."""
    if not REFERENCE.is_file():
        pytest.skip(f"the behaviour reference is not at {REFERENCE}")
    parts = re.split(r"(?m)^## (\d+)\. ", REFERENCE.read_text(encoding="utf-8"))
    chosen = [text for number, text in zip(parts[1::2], parts[2::2], strict=True) if number in SECTIONS]
    pattern = rf"(?m)^(?:\| )?((?:{'|'.join(AREAS)})-\d+[a-z]?)\b"
    return [row for text in chosen for row in re.findall(pattern, text)]


def written() -> set[str]:
    """Names of all test functions."""
    files = (path for folder in ("tests", "property_tests") for path in (ROOT / folder).rglob("test_*.py"))
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in files)
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_row_of_the_reference_is_in_the_table_and_no_other() -> None:
    found = reference()
    assert len(found) > 150
    assert sorted(set(found) - set(ROWS)) == []
    assert sorted(set(ROWS) - set(found)) == []


def test_every_answer_names_a_rule_a_step_or_a_test_that_exists_or_gives_a_reason() -> None:
    known = {
        "rule": {rule.id for rule in RULES},
        "step": {kind.__name__ for kind in get_args(Step)},
        "test": written(),
    }
    wrong = [
        f"{row}: {answer}"
        for row, answers in (ROWS | behaviour_rows.GAPS).items()
        for answer in answers
        for kind, _, said in [answer.partition(" ")]
        if (said not in known[kind] if kind in known else kind not in ("deviation", "pending") or len(said) < 5)
    ]
    assert wrong == []
    assert all(ROWS.values())


def test_no_row_is_pending() -> None:
    assert [row for row, answers in ROWS.items() if any(one.startswith("pending") for one in answers)] == []


def test_no_row_stands_in_two_blocks_of_the_table() -> None:
    tables = {name: table for name, table in vars(behaviour_rows).items() if isinstance(table, dict) and name.isupper()}
    del tables["ROWS"], tables["GAPS"]
    counted = Counter(row for table in tables.values() for row in table)
    assert [row for row, count in counted.items() if count > 1] == []
    assert len(counted) == len(ROWS)
