"""Plans of hand-picked configs as text: ``golden/plans/<engine>.txt``, and ``golden/sentences.txt`` for their words."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from prepkit import planner
from prepkit.steps import Step
from tests.support.golden import assert_golden
from tests.support.readable_plans import CASES, asked, planned, sentences, text

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("engine", CASES)
def test_a_plan_reads_as_it_did_when_somebody_last_read_it(engine: str) -> None:
    cases = "\n\n".join(text(engine, *case) for case in CASES[engine])
    assert_golden(GOLDEN / "plans" / f"{engine}.txt", f"# {engine}\n\n{cases}\n")


def test_the_plans_say_the_sentences_that_somebody_has_read() -> None:
    assert_golden(GOLDEN / "sentences.txt", "\n".join(sentences()) + "\n")


def test_the_plans_have_every_kind_of_step() -> None:
    seen = {type(one.step) for plan in planned() for one in plan.steps}
    assert set(get_args(Step)) == seen


@pytest.mark.parametrize("engine", CASES)
def test_most_cases_have_a_plan(engine: str) -> None:
    made = [planner.plan(*asked(engine, *case)).value_or(None) for case in CASES[engine]]
    assert sum(one is not None for one in made) > (6 if engine == "xla" else 15)
