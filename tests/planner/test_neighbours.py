"""What every change of one value makes of a plan: the same one, another, or a refusal.

``golden/neighbours/<plan>.txt`` has the outcomes with the changes that lead there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from attrs import fields, has
from returns.result import Success

from prepkit import codec, planner
from prepkit.config import Config
from prepkit.facts import Facts
from prepkit.findings import errors
from prepkit.plan import Plan
from prepkit.predict import predict
from prepkit.predict.inputs import inputs_of
from tests.planner.test_drawn_plans import COUNT
from tests.support.drawn_runs import ENGINES, is_small, planned, run
from tests.support.golden import assert_golden
from tests.support.neighbours import asked
from tests.support.plans import PLANS

GOLDEN = Path(__file__).parent / "golden" / "neighbours"
COVER: dict[str, tuple[int, ...]] = {
    "single": (17, 27, 29, 36, 41, 43, 85, 104, 152),
    "ddp": (70, 99, 103, 130, 152, 158),
    "fsdp1": (1, 38, 53, 62, 141, 146),
    "fsdp2": (6, 28, 45, 46, 67, 82, 115, 135, 157),
    "tensor": (11, 27, 39, 110, 112, 138),
    "zero": (67, 130, 157, 163, 184, 206, 232, 262, 391),
    "xla": (21, 70, 76, 117, 151),
}
"""Drawn runs whose plans have, together, everything that ``features`` finds in any drawn plan of their engine."""
DRAWN = {f"{engine}-{number}": partial(planned, engine, number) for engine in ENGINES for number in COVER[engine]}
BASES: dict[str, Callable[[], Plan]] = {**PLANS, **DRAWN}


def outcome(cfg: Config, facts: Facts) -> str:
    """Rules that refuse; else the kinds of steps, and digests of the plan and its numbers."""
    outcome = planner.plan(cfg, facts)
    if not isinstance(outcome, Success):
        return f"refused by {' '.join(dict.fromkeys(one.rule for one in errors(outcome.failure())))}"
    plan = outcome.unwrap()
    warned = "".join(f" {one.rule}" for one in plan.warnings)
    made = (plan.mesh, plan.steps, plan.layout, plan.owners)
    return f"{_digest(codec.to_data(made))} {_digest((codec.to_data(predict(plan)), inputs_of(plan)))}{warned}"


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


def features(plan: Plan) -> set[str]:
    """What a planner has to treat each in its own way, by name."""
    cfg = plan.config
    chosen = (getattr(cfg, field.name) for field in fields(Config) if field.name not in ("engine", "loaders"))
    kinds = {type(step.step).__name__ for step in plan.steps}
    return {
        *kinds,
        *(f"{kind} with {axis.name}" for kind in kinds for axis in plan.mesh if axis.size > 1),
        *(type(value).__name__ for value in chosen if has(type(value))),
        *("units that stand" for _ in plan.facts.model.units[:1]),
        *("device map" for _ in plan.facts.model.device_map[:1]),
    }


def drawn(engine: str) -> dict[int, set[str]]:
    """Numbers of the drawn runs that ``planned`` gives as they are, with the features of their plans."""
    found = {}
    for number in range(COUNT[engine]):
        cfg, facts = run(engine, number)
        if is_small(facts) and isinstance(made := planner.plan(cfg, facts), Success):
            found[number] = features(made.unwrap())
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_the_bases_have_all_features_of_the_drawn_plans(engine: str) -> None:
    found, cover = drawn(engine), set[int]()
    left = set[str]().union(*found.values())
    while left:
        best = max(found, key=lambda number: (len(found[number] & left), -number))
        cover, left = cover | {best}, left - found[best]
    assert COVER[engine] == tuple(sorted(cover)), "write these numbers in its place"
