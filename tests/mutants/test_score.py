"""Which tests try a mutant, what is remembered, and how it is counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest
from attrs import evolve

from tests.mutants import report
from tests.mutants.areas import PURE
from tests.mutants.host import IMPORT, Killed, Survived
from tests.mutants.ledger import Entry, Ledger, equivalents, source_digest
from tests.mutants.mutant import Mutant
from tests.mutants.reach import Reach, Run, by_scope, ranges, scopes
from tests.mutants.score import attacks_on

PATH = "prepkit/codec/text.py"
SCOPE = scopes(PATH)["brief"]
MUTANT = Mutant(
    path=PATH,
    scope="brief",
    operator="constant",
    start=0,
    end=1,
    old="1",
    new="2",
    line=SCOPE.first + 2,
    lines=(SCOPE.first + 2, SCOPE.first + 3),
)


def run(test: str, lines: set[int], seconds: float = 1.0, *, gang: bool = False, passed: bool = True) -> Run:
    """Lines count from the function's first."""
    return Run(test=test, passed=passed, seconds=seconds, gang=gang, lines={SCOPE.key: ranges(lines)})


def reach(*runs: Run, early: set[int] = frozenset()) -> Reach:
    return Reach(imports={SCOPE.key: ranges(early)}, runs={run.test: run for run in runs}, seen=frozenset({SCOPE.key}))


def tried(
    mutant: Mutant, reach: Reach, budget_s: float = 20.0, kills: object = None
) -> list[tuple[str, tuple[str, ...]]]:
    attacks = attacks_on(mutant, reach, PURE, budget_s, kills or defaultdict(Counter))
    return [(attack.way, attack.tests) for attack in attacks]


def test_only_tests_that_run_the_line_are_tried_and_the_fastest_first() -> None:
    known = reach(
        run("slow", {2}, 3.0), run("quick", {3}, 0.1), run("elsewhere", {1, 4}), run("red", {2}, passed=False)
    )
    assert tried(MUTANT, known) == [("warm", ("quick", "slow"))]


def test_worker_processes_are_started_only_when_no_other_test_has_killed() -> None:
    known = reach(run("gang", {2}, 0.1, gang=True), run("alone", {2}, 2.0))
    assert tried(MUTANT, known) == [("warm", ("alone",)), ("warm", ("gang",))]


def test_a_mutant_that_no_test_runs_is_not_tried() -> None:
    assert tried(MUTANT, reach(run("elsewhere", {1}))) == []


def test_what_runs_at_import_is_tried_by_tests_nearby_and_then_by_others() -> None:
    table = evolve(MUTANT, scope="")
    known = reach(run("tests/cli/test_cli.py::a", {1}, 0.1), run("tests/codec/test_text.py::b", {1}), early={2})
    far, near = ("cold", ("tests/cli/test_cli.py::a",)), ("cold", ("tests/codec/test_text.py::b",))
    assert tried(table, known) == [near, far]
    assert tried(MUTANT, known) == [near, far]


def test_a_function_that_has_run_at_import_is_tried_anew_because_what_it_made_is_kept() -> None:
    known = reach(run("tests/codec/test_text.py::b", {2}), early={1})
    assert tried(MUTANT, known) == [(way, ("tests/codec/test_text.py::b",)) for way in ("warm", "cold")]


def test_tests_that_read_tables_try_a_table_though_they_run_nothing_of_its_file() -> None:
    other = scopes("prepkit/codec/converter.py")["read"].key
    reads = evolve(run("tests/rules/test_rules.py::every_rule", set()), lines={other: ((1, 1),)})
    known = reach(run("tests/codec/test_text.py::b", {1}), reads, evolve(reads, test="tests/cli/test_cli.py::c"))
    near, table = ("cold", ("tests/codec/test_text.py::b",)), ("cold", ("tests/rules/test_rules.py::every_rule",))
    assert tried(evolve(MUTANT, scope=""), known) == [near, table]


def test_tests_that_killed_its_neighbours_come_first_and_the_budget_holds() -> None:
    known = reach(run("a", {2}, 1.0), run("b", {2}, 2.0), run("c", {2}, 3.0))
    kills = defaultdict(Counter, {PATH: Counter(c=1), f"{PATH} brief": Counter(b=1)})
    assert tried(MUTANT, known, kills=kills) == [("warm", ("b", "c", "a"))]
    assert tried(MUTANT, known, budget_s=2.0) == [("warm", ("a",))]


def test_what_was_measured_holds_when_the_function_stands_elsewhere_and_in_part_when_it_has_changed() -> None:
    path, name, text = SCOPE.key
    moved = evolve(run("moved", {3}), lines={("prepkit/old.py", name, text): ((3, 3),)})
    missed = evolve(run("missed", {3}), lines={("prepkit/old.py", name, text): ((9, 9),)})
    changed = evolve(run("changed", {3}), lines={(path, name, "another text"): ((9, 9),)})
    known = reach(moved, missed, changed)
    assert [run.test for run in known.running(MUTANT)] == ["changed", "moved"]
    assert [run.test for run in evolve(known, runs={"missed": missed}, seen=frozenset()).running(MUTANT)] == []


def test_a_function_that_is_new_is_tried_by_the_tests_of_its_file() -> None:
    other = evolve(run("other", {3}), lines={(PATH, "shown", "text"): ((1, 1),)})
    assert reach(other).running(MUTANT) == []
    assert evolve(reach(other), seen=frozenset()).running(MUTANT) == [other]


def test_lines_count_from_the_first_of_their_function() -> None:
    assert by_scope({PATH: {SCOPE.first, SCOPE.first + 2, 1}}) == {SCOPE.key: ((0, 0), (2, 2))}
    assert by_scope({PATH: {SCOPE.first}}) == {}


def entry(test: str = "", tests: str = "t") -> Entry:
    return Entry(id=MUTANT.id, source=source_digest(MUTANT), tests=tests, seconds=1.0, test=test)


def test_a_killed_mutant_is_known_until_its_source_or_its_killer_changes(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.jsonl")
    ledger.add(entry("a"))
    read = Ledger(tmp_path / "l.jsonl")
    read.read()
    assert read.known(MUTANT, "other tests", {"a"}).verdict == Killed("a", "")
    assert read.known(MUTANT, "t", {"b"}) is None
    read.add(evolve(entry("a"), source="other"))
    assert read.known(MUTANT, "t", {"a"}) is None
    read.add(entry(IMPORT))
    assert read.known(MUTANT, "t", set()) is not None


def test_a_survivor_is_tried_again_when_any_test_changes(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.jsonl")
    ledger.add(entry())
    assert ledger.known(MUTANT, "t", ()).verdict == Survived()
    assert ledger.known(MUTANT, "other tests", ()) is None


def test_counts_by_file_and_the_share_of_those_that_can_be_killed() -> None:
    other = evolve(MUTANT, path="prepkit/api/acting.py")
    verdicts = {
        MUTANT: Killed("a", ""),
        evolve(MUTANT, new="3"): Survived(),
        evolve(MUTANT, new="4"): Survived(),
        other: Survived(),
    }
    same = {evolve(MUTANT, new="3").id: "nobody reads it"}
    api, text, total = report.rows(verdicts, same)
    assert (api.killed, api.survived, api.equivalent) == (0, 1, 0)
    assert (text.killed, text.survived, text.equivalent, text.share) == (1, 1, 1, 0.5)
    assert (total.tried, total.killed) == (4, 1)
    assert len(report.survivors(verdicts, same)) == 2
    assert report.wrong(verdicts, {MUTANT.id: "so they say"}) == [MUTANT.id]


def test_an_equivalent_without_a_reason_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "equivalent.toml"
    table.write_text('[[equivalent]]\nid = "a"\nreason = "so"\n')
    with pytest.raises(ValueError, match="no reason is given for a"):
        equivalents(table)
    assert all(len(reason) > 10 for reason in equivalents().values())
