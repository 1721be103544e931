"""What every change of one value makes of a plan: the same one, another, or a refusal.

``golden/neighbours/<plan>.txt`` has the outcomes with the changes that lead there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from returns.result import Success

from prepkit import codec, planner
from prepkit.config import Config
from prepkit.facts import Facts
from prepkit.findings import errors
from prepkit.plan import Plan
from prepkit.predict import predict
from tests.support.drawn_runs import ENGINES, planned
from tests.support.golden import assert_golden
from tests.support.neighbours import asked
from tests.support.plans import PLANS

GOLDEN = Path(__file__).parent / "golden" / "neighbours"
DRAWN = {f"{engine}-{number}": partial(planned, engine, number) for engine in ENGINES for number in (0, 50)}
BASES: dict[str, Callable[[], Plan]] = {**PLANS, **DRAWN}


def outcome(cfg: Config, facts: Facts) -> str:
    """Rules that refuse; else the kinds of steps, and digests of the plan and its numbers."""
    outcome = planner.plan(cfg, facts)
    if not isinstance(outcome, Success):
        return f"refused by {' '.join(dict.fromkeys(one.rule for one in errors(outcome.failure())))}"
    plan = outcome.unwrap()
    warned = "".join(f" {one.rule}" for one in plan.warnings)
    made = (plan.mesh, plan.steps, plan.layout, plan.owners)
    return f"{_digest(codec.to_data(made))} {_digest(codec.to_data(predict(plan)))}{warned}"


def _digest(data: object) -> str:
    return codec.digest(repr(data))[-4:]


@pytest.mark.parametrize("name", BASES)
def test_a_change_of_one_value_makes_of_a_plan_what_it_made(name: str) -> None:
    plan = BASES[name]()
    found: dict[str, list[str]] = defaultdict(list)
    for place, cfg, facts in asked(plan.config, plan.facts):
        found[outcome(cfg, facts)].append(place)
    text = f"{outcome(plan.config, plan.facts)}\n"
    text += "".join(f"{words}: {', '.join(places)}\n" for words, places in found.items())
    assert_golden(GOLDEN / f"{name}.txt", text)
