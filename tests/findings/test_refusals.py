"""Every id that a finding can carry is one that ``prepkit rules`` can explain."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from attrs import frozen

from prepkit.ranks.agree import RULES
from prepkit.render.text import rule_text
from prepkit.rules import LAW
from prepkit.rules.rule import Moment, Rule

ROOT = Path(__file__).resolve().parents[2]

PREFIXES = {
    "refusal": "codec.",
    "MisfitError": "codec.",
    "flaw": "codec.",
    "constant": "",
    "_refuse": "config.",
    "_finding": "config.",
    "error": "import.",
    "warn": "import.",
    "_say": "import.",
}
"""Functions of codec and importers that take an id without its subject, and the subject."""

TELLERS = {"found", "refused", "told", "failed"}
"""Functions that take a whole id first."""

FILES = [path for path in sorted((ROOT / "prepkit").rglob("*.py")) if path.name != "refusals.py"]

REFUSALS = tuple(rule for rule in LAW if rule.told_by)
KNOWN = {rule.id for rule in LAW}


def _text(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


@frozen(kw_only=True)
class Seen:
    """What a file says of findings: ids with their lines."""

    made: tuple[tuple[str, int], ...]
    """Ids that it makes findings with, as far as they stand there in letters."""
    named: tuple[tuple[str, int], ...]
    """Ids in letters that stand in a table or a constant."""
    writes: bool
    """Whether it writes ``Finding(...)``."""


@cache
def _seen(path: Path) -> Seen:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    return Seen(
        made=tuple(_ids(path, calls)),
        named=tuple(_named(nodes)),
        writes=any(getattr(node.func, "id", getattr(node.func, "attr", "")) == "Finding" for node in calls),
    )


def _ids(path: Path, calls: list[ast.Call]) -> Iterator[tuple[str, int]]:
    short = path.parent.name in ("codec", "importers", "exporters")
    for node in calls:
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        keyword = next((_text(word.value) for word in node.keywords if word.arg == "rule"), None)
        first = _text(node.args[0]) if node.args else None
        if name == "Finding" and keyword:
            yield keyword, node.lineno
        elif first and name in TELLERS:
            yield first, node.lineno
        elif short and name in PREFIXES and first and "." not in first:
            yield PREFIXES[name] + first, node.lineno


def _named(nodes: list[ast.AST]) -> Iterator[tuple[str, int]]:
    """``subject.what-is-wrong`` with a subject of the refusals."""
    subjects = {"plan", "cli", "codec", "diff", "checkpoint", "export", "accelerate"}
    subjects &= {refusal.id.partition(".")[0] for refusal in REFUSALS}
    for node in nodes:
        text = _text(node) or ""
        subject, _, rest = text.partition(".")
        if subject in subjects and "-" in rest and rest.replace("-", "").isalpha():
            assert isinstance(node, ast.Constant)
            yield text, node.lineno


def test_every_id_that_a_finding_is_made_with_can_be_looked_up() -> None:
    unknown = [
        f"{path.relative_to(ROOT)}:{line}: {rule} is in no table; add its row to prepkit/rules/refusals.py"
        for path in FILES
        for rule, line in (*_seen(path).made, *_seen(path).named)
        if rule not in KNOWN
    ]
    assert not unknown, "\n".join(unknown)


def test_the_search_finds_ids_of_every_kind_so_that_it_can_miss_none() -> None:
    met = {rule for path in FILES for rule, _ in (*_seen(path).made, *_seen(path).named)}
    assert met >= {refusal.id for refusal in REFUSALS}


MAKERS = {
    "rules/rule.py": "a row makes it of a hit",
    "interpreter/__init__.py": "it knows no rules, and tells one id",
    "formats/policy.py": "a team's own threshold has an id of the team's",
}
"""Files that may write ``Finding(...)``, and why; every other takes the row of an id."""


def test_findings_are_made_by_rows_of_the_law_book_alone() -> None:
    made = {
        str(path.relative_to(ROOT / "prepkit"))
        for path in sorted((ROOT / "prepkit").rglob("*.py"))
        if _seen(path).writes
    }
    assert made == set(MAKERS), "write prepkit.rules.found(id, where, what) for what is not here"


def test_no_two_rows_of_the_law_book_have_one_id() -> None:
    ids = [entry.id for entry in LAW]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_a_row_that_calls_tell_says_what_holds_what_helps_and_where_it_is_met(refusal: Rule) -> None:
    lines = [line.split()[0] for line in rule_text(refusal).splitlines()]
    assert lines[:3] == [refusal.severity.value, "holds", "fix"]
    assert lines[-1] == "met"
    assert refusal.summary.endswith(".")
    assert refusal.fix.endswith(".")


HANDLERS = ROOT / "prepkit/applying/handlers"


def test_what_steps_tell_is_asked_by_steps_and_nothing_else_is() -> None:
    files = (*sorted(HANDLERS.glob("*.py")), ROOT / "prepkit/ranks/launcher.py", ROOT / "prepkit/ranks/agree.py")
    told = {rule for path in files for rule, _ in _seen(path).made} | set(RULES.values())
    told |= {"apply.not-asked", "apply.step-failed", "plan.ranks-differ"}  # by interpreter, apply and ``ranks.agree``
    told |= {"fp8.library-missing", "xla.library-missing"}  # by an argument
    assert told == {rule.id for rule in LAW if Moment.ACT in rule.at}
