"""Every planted fault of an executor is caught by verification, and nothing is said where there is none."""

from __future__ import annotations

import pytest

from prepkit.applying.step_kinds import KINDS
from prepkit.rules import due
from prepkit.rules.rule import Moment
from tests.support.gang import Gang
from tests.support.planted_faults import FAULTS, said
from tests.support.step_kinds import WITHOUT_A_PLANTED_FAULT


def test_there_are_at_least_fifteen_faults_and_each_kind_of_step_that_acts_on_objects_has_one() -> None:
    assert len(FAULTS) >= 15
    lacking = sorted(kind.__name__ for kind in {*KINDS} - {fault.kind for fault in FAULTS} - {*WITHOUT_A_PLANTED_FAULT})
    assert not lacking, f"tests/support/planted_faults.py: FAULTS has none of {', '.join(lacking)}"
    assert {fault.kind for fault in FAULTS} == {*KINDS} - {*WITHOUT_A_PLANTED_FAULT}


def test_each_rule_that_is_asked_after_apply_has_a_fault_that_it_catches_by_its_id() -> None:
    lacking = {rule.id for rule in due(Moment.APPLY) if not any(rule.id in fault.caught for fault in FAULTS)}
    elsewhere = {"run.other-owners", "run.overwritten-ranks"}  # test_owners.py, tests/applying/test_own_copies.py
    assert lacking == elsewhere, "write its id into the `caught` of a fault"


@pytest.mark.parametrize("index", [i for i, f in enumerate(FAULTS) if f.world == 1], ids=lambda i: FAULTS[i].what)
def test_a_planted_fault_is_caught(index: int) -> None:
    found = said(0, 1, index)
    assert any(FAULTS[index].caught in text for text in found), found


@pytest.mark.parametrize("index", [i for i, f in enumerate(FAULTS) if f.world == 2], ids=lambda i: FAULTS[i].what)
def test_a_planted_fault_is_caught_by_two_ranks(gang2: Gang, index: int) -> None:
    found = gang2.run(said, index)
    assert any(FAULTS[index].caught in text for texts in found for text in texts), found
    assert all(found), "what one rank finds, every rank hears"


def test_without_a_fault_nothing_is_said(gang2: Gang) -> None:
    assert said(0, 1, None) == []
    assert gang2.run(said, None) == [[], []]
