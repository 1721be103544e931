"""Never half done: after any fault everything is as before, or the halt says what is not (``make faults``)."""

from __future__ import annotations

from typing import get_args

import pytest

from prepkit.applying.step_kinds import KINDS, handlers
from prepkit.config import Engine
from prepkit.steps import InitializeTensors, ReadTensors, SendTensors
from tests.support.failures_midway import CLEAN, ENGINES, Outcome, all_outcomes, case, table
from tests.support.step_kinds import WITHOUT_A_PLACE_WHERE_IT_FAILS

NO_WAY_BACK = {kind.__name__ for kind, handler in handlers().items() if handler.undo is None}

WRITES = {kind.__name__ for kind in (InitializeTensors, ReadTensors, SendTensors)}
"""What they write over is lost, and told."""


def test_every_engine_and_every_step_kind_is_made_to_fail() -> None:
    assert {type(one.cfg.engine) for one in ENGINES.values()} == set(get_args(Engine))
    made = {type(one.step) for engine in ENGINES for one in case(engine)[0].steps}
    lacking = sorted(kind.__name__ for kind in set(KINDS) - made - set(WITHOUT_A_PLACE_WHERE_IT_FAILS))
    assert not lacking, f"tests/support/failures_midway.py: no engine of ENGINES has {', '.join(lacking)}"
    assert made == set(KINDS) - set(WITHOUT_A_PLACE_WHERE_IT_FAILS)


@pytest.mark.parametrize("engine", list(ENGINES))
def test_a_fault_at_any_place_leaves_everything_as_before_or_the_halt_says_what_stands(engine: str) -> None:
    outcomes = list(all_outcomes(engine))
    assert all(one.honest for one in outcomes), table(outcomes)
    steps = [type(one.step).__name__ for one in case(engine)[0].steps]
    assert {one.step for one in outcomes} == {*steps, "(the end)"}
    first = next((index for index, name in enumerate(steps) if name in NO_WAY_BACK | WRITES), len(steps))
    for one in outcomes:  # before the first step without a way back everything is as it was, whatever fails
        if one.claimed != CLEAN:
            assert first < len(steps), one
            assert one.step not in steps[:first], one


def unclean(outcome: Outcome) -> Outcome:
    return Outcome(outcome.engine, outcome.step, outcome.place, CLEAN, ("parameters",))


def test_a_wrong_claim_is_dishonest_and_stands_in_the_table() -> None:
    wrong = unclean(Outcome("Single", "MoveModel", "model:41", CLEAN, ()))
    assert not wrong.honest
    assert table([wrong]).splitlines()[1].endswith("  1 x DISHONEST at model:41: parameters")
