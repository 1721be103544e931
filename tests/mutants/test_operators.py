"""What is mutated, and what is left alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.areas import GROUPS, NAMED, named
from tests.mutants.mutant import Mutant, applied, drawn
from tests.mutants.operators import mutants
from tests.mutants.patch import ROOT


def changes(source: str) -> set[tuple[str, str]]:
    return {(mutant.old, mutant.new) for mutant in mutants("a.py", source.encode())}


@pytest.mark.parametrize(
    ("source", "old", "new"),
    [
        ("def f(a, b):\n    x = a < b", "a < b", "(a <= b)"),
        ("def f(a, b):\n    x = a < b", "a < b", "(a >= b)"),
        ("def f(a, b):\n    x = a is b", "a is b", "(a is not b)"),
        ("def f(a, b):\n    x = a and b", "a and b", "(a or b)"),
        ("def f(a, b):\n    x = a and b", "a and b", "(b)"),
        ("def f(a):\n    x = not a", "not a", "(a)"),
        ("def f():\n    x = 3", "3", "4"),
        ("def f():\n    x = 3", "3", "2"),
        ("def f():\n    x = 'gloo'", "'gloo'", '""'),
        ("def f(a, b, c):\n    x = a if b else c", "a if b else c", "(c if b else a)"),
        ("def f(a):\n    g(a, key=a)", "g(a, key=a)", "(g(a))"),
        ("def f(a):\n    a.b = 1", "a.b = 1", "pass"),
        ("def f(a):\n    g(a)", "g(a)", "pass"),
        ("def f(a):\n    yield a", "yield a", "yield from ()"),
        ("def f(a):\n    if a:\n        g()", "a", "(not (a))"),
        ("def f(a):\n    for b in a:\n        g()", "a", "()"),
        ("def f(a) -> bool:\n    return a.b", "a.b", "(not (a.b))"),
        ("def f(a) -> tuple[int, ...]:\n    return a.b", "a.b", "()"),
        ("def f(a):\n    x = [b for b in a if b.c]", "b.c", "True"),
        ("def f(a):\n    match a:\n        case 1:\n            g()", "1", "1 if False"),
        ("TABLE = {'a': 1, 'b': 2}", "{'a': 1, 'b': 2}", "({'b': 2})"),
        ("TABLE = ('a', 'b')", "('a', 'b')", "(('b',))"),
        ("def f(a):\n    x = min(a)", "min(a)", "(max(a))"),
        ("def f(a):\n    x = 1\n    x = a", "x = a", "pass"),
    ],
)
def test_each_kind_of_change_is_made(source: str, old: str, new: str) -> None:
    assert (old, new) in changes(source)


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring."""',
        "def f(a: tuple[int, str] = NO) -> dict[str, bool]:\n    'Doc.'",
        "def f(a):\n    assert a > 3",
        "def f(a):\n    x = f'{a + 1} of 3'",
        "def f(a):\n    x = 'a message to people'",
        "def f(a):\n    x = Hit",
        "def f(a):\n    match a:\n        case _:\n            assert_never(a)",
        "if TYPE_CHECKING:\n    X = 3",
        "__all__ = ['a', 'b']",
        "T = TypeVar('T', bound=int)",
        "Json: TypeAlias = 'int | str'",
        "Piece = tuple[int, ...]",
        "Piece = A | B",
        "@frozen(kw_only=True)\nclass A:\n    a: int",
        "def f(a):\n    what = 'short'",
        "from a import b",
    ],
)
def test_what_only_people_and_type_checkers_read_is_left_alone(source: str) -> None:
    assert changes(source) == set()


def test_arguments_that_are_text_for_people_are_left_alone() -> None:
    assert changes("def f(a):\n    x = Hit('here', 'wrong', 'mend')") == {("'here'", '""')}
    assert changes("def f(a):\n    x = isinstance(a, (B, C))") == set()


def test_the_files_that_are_scored_give_code_and_no_two_mutants_of_one_name() -> None:
    files = [file for group in GROUPS for area in group.areas for file in (ROOT / area.folder).rglob("*.py")]
    for file in files:
        source = file.read_bytes()
        found = mutants(str(file.relative_to(ROOT)), source)
        assert len({mutant.id for mutant in found}) == len(found)
        for mutant in found[::60]:
            ast.parse(applied(mutant, source))


def test_columns_count_bytes() -> None:
    source = "def f(a):\n    g('é…', a == 1)\n".encode()
    (equal,) = [mutant for mutant in mutants("a.py", source) if mutant.operator == "comparison"]
    assert applied(equal, source).decode() == "def f(a):\n    g('é…', (a != 1))\n"


def test_a_mutant_keeps_its_name_when_code_elsewhere_changes() -> None:
    before = mutants("a.py", b"def f(a):\n    return a == 1\n")
    after = mutants("a.py", b"import b\n\n\ndef g(a):\n    return a != 2\n\n\ndef f(a):\n    return a == 1\n")
    assert {mutant.id for mutant in before} < {mutant.id for mutant in after}


def test_a_mutant_is_not_put_into_another_text() -> None:
    mutant, *_ = mutants("a.py", b"x = True\n")
    with pytest.raises(ValueError, match="no longer"):
        applied(mutant, b"x = None\n")


def test_the_draw_depends_on_seed_and_names_alone() -> None:
    every = mutants("a.py", b"def f(a):\n    return a + 1 == 2 and a - 3 < 4 or not a\n")
    others = mutants("b.py", b"def f(a):\n    return a + 1 == 2\n")
    first = drawn(every, 5, seed=1)
    assert first == drawn(tuple(reversed(every)), 5, seed=1) != drawn(every, 5, seed=2)
    assert set(drawn((*every, *others), 5, seed=1)) - set(others) <= set(first)


@pytest.mark.parametrize("row", [row for rows in NAMED.values() for row in rows], ids=lambda row: row.name)
def test_what_the_named_mutants_change_is_still_there(row: object) -> None:
    mutant = named(row.folder, row.old, row.new)
    ast.parse(applied(mutant, (ROOT / mutant.path).read_bytes()))


def test_a_named_mutant_that_is_gone_says_so(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="mend NAMED"):
        named("prepkit", "no such text anywhere", "")


def test_lines_of_a_header_are_its_own() -> None:
    found = mutants("a.py", b"def f(a):\n    if (\n        a\n    ):\n        g(\n            1\n        )\n")
    lines = {mutant.old: mutant.lines for mutant in found}
    assert lines["a"] == (3,)
    assert lines["1"] == (5, 6, 7)


def sample() -> Mutant:
    return mutants("a.py", b"x = True\n")[0]


def test_a_place_can_be_clicked() -> None:
    assert sample().place == "a.py:1"
    assert sample().id == "a.py <module>: True => False"
