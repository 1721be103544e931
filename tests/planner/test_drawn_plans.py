"""What many drawn runs get: findings, repairs, steps, bytes, traffic and what a budget proposes, as last reviewed.

A change of a rule, a planner or a formula shows here which runs it changes, and in what. ``python -m
tests.planner.test_drawn_plans fsdp2 17`` prints one of them whole.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve
from returns.result import Success

from prepkit import codec, planner
from prepkit.config import Config
from prepkit.facts import Facts
from prepkit.findings import Finding
from prepkit.plan import Plan
from prepkit.planner.budget.moves import Move, moves
from prepkit.planner.sweep import ENGINES as SWEPT
from prepkit.planner.sweep import TENSOR, sweep, sweep_data, sweep_text
from prepkit.predict import predict
from prepkit.predict.inputs import inputs_of
from prepkit.predict.prediction import Prediction
from prepkit.rules import LATE_RULES, RULES
from tests.support.drawn_runs import ENGINES, planned, run
from tests.support.golden import assert_golden

GOLDEN = Path(__file__).parent / "golden" / "drawn"
COUNT = dict.fromkeys(ENGINES, 160) | {"zero": 480}
CHUNK = 20
SMALL = 50
"""Parameters, up to which every other question is asked as well."""
REPAIRS = {rule.id: rule.repair for rule in (*RULES, *LATE_RULES) if rule.repair}


def lines(engine: str, number: int) -> Iterator[str]:
    """One run, in a few lines."""
    cfg, facts = run(engine, number)
    yield f"{engine} {number}"
    for _ in range(4):
        outcome = planner.plan(cfg, facts)
        if isinstance(outcome, Success):
            plan = outcome.unwrap()
            yield from _warned(plan)
            yield from _planned(plan)
            yield from _asked(plan, number)
            return
        findings = outcome.failure()
        yield f"  refused  {_named(findings)}"
        rule = next((found.rule for found in findings if found.rule in REPAIRS), None)
        if rule is None:
            return
        yield f"  mended   {rule}"
        cfg = REPAIRS[rule](cfg, facts)


def _named(findings: tuple[Finding, ...]) -> str:
    return " ".join(f"{one.rule}:{_digest(one)}" for one in findings)


def _digest(value: object) -> str:
    return codec.digest(value)[-4:]


def _warned(plan: Plan) -> Iterator[str]:
    for name, findings in (("warned", plan.warnings), ("accepted", plan.overridden)):
        if findings:
            yield f"  {name:8} {_named(findings)}"


def _planned(plan: Plan) -> Iterator[str]:
    steps = " ".join(f"{type(step.step).__name__}:{_digest(step)}" for step in plan.steps)
    yield f"  steps    {steps}"
    mesh = " x ".join(f"{axis.name} {axis.size}" for axis in plan.mesh)
    yield f"  mesh     {mesh}, layout {_digest(plan.layout)}, owners {_digest(plan.owners)}"
    yield f"  read     {codec.digest(repr(inputs_of(plan)))[-4:]} for the formulas"
    yield from _predicted(predict(plan))


def _predicted(found: Prediction) -> Iterator[str]:
    for one in found.classes[:4]:
        held = f"{one.total()}, host {one.total('host')}, for certain {one.floor()}, terms {_digest(one)}"
        yield f"  ranks    {one.first} to {one.last}: {held}"
    left_out = f", {len(found.not_predicted)} left out" if found.not_predicted else ""
    yield f"  sent     {found.sent}, of it {found.crossing(8)} between nodes, {_digest(found)}{left_out}, {found.about}"


def _asked(plan: Plan, number: int) -> Iterator[str]:
    """What is asked of a plan that stands: where it meets another machine, and where it has less memory."""
    env = plan.facts.env
    less = () if number % 3 else (evolve(env, memory=2048),)
    for other in (*less, evolve(env, torch="2.6.0", per_node=2, libraries=())):
        if since := planner.since(plan, evolve(plan.facts, env=other)):
            yield f"  later    {_named(since)}"
    if len(plan.layout) > SMALL:
        return
    changed = ((move.about, move.change(plan.config)) for move in moves(plan))
    yield f"  moves    {' '.join(f'{about}:{_digest(cfg)}' for about, cfg in changed if cfg)}"
    prediction = predict(plan, activations=64 if len(plan.layout) % 2 else None)
    for part in ((9, 6, 3, 10, 12)[number % 5],) if prediction.classes else ():
        fit = planner.fits(plan, prediction.fullest.total() * part // 10, activations=64 if part in (6, 12) else None)
        options = " ".join(_digest(str(option)) for option in fit.options)
        yield f"  x 0.{part:<2}   {fit.verdict}, {_digest(str(fit))}: {options}"


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_budget_may_change_is_what_it_was(engine: str) -> None:
    """Every move of a few plans, made on many drawn configs, also of other engines and on those without a plan."""
    possible = tuple(move for least in range(0, 120, 20) for move in moves(planned(engine, least)))
    others = [run(other, number)[0] for other in ENGINES for number in range(0, COUNT[other], 2)]

    def made(move: Move) -> str:
        changed = (move.change(cfg) for cfg in others)
        return codec.digest(repr([cfg and (cfg.engine, cfg.mesh, cfg.precision, cfg.accumulation) for cfg in changed]))

    lines = (f"{move.about} {move.caveat} {move.series}: {made(move)[-8:]}" for move in possible)
    assert_golden(GOLDEN / f"moves-{engine}.txt", "\n".join(lines) + "\n")


CHUNKS = [(engine, first) for engine, count in COUNT.items() for first in range(0, count, CHUNK)]


@pytest.mark.parametrize(("engine", "first"), CHUNKS)
def test_drawn_runs_get_the_plans_that_they_had(engine: str, first: int) -> None:
    text = "\n".join(line for number in range(first, first + CHUNK) for line in lines(engine, number)) + "\n"
    assert_golden(GOLDEN / f"{engine}-{first:03}.txt", text)


@pytest.mark.parametrize("engine", ENGINES)
def test_drawn_runs_are_swept_as_they_were(engine: str) -> None:
    def swept(number: int) -> str:
        cfg, facts = run(engine, number)
        if len(facts.model.params) > SMALL:
            return ""
        rows, refused = sweep(cfg, facts, worlds=((1, 2, 8, 96), (3, 4, 12))[number % 2], engines=_some(number))
        head = f"{engine} {number}: {len(rows)} rows, {len(refused)} refused"
        return f"{head}, {_digest(sweep_data(rows, refused))} {_digest(sweep_text(rows, refused))}"

    def _some(number: int) -> tuple[str, ...]:
        return tuple(SWEPT)[number % 3 :: 3] if number < 18 else (TENSOR, "fsdp2", "fsdp1")

    text = "\n".join(map(swept, range(40))) + "\n"
    assert_golden(GOLDEN / f"swept-{engine}.txt", text)


@pytest.mark.parametrize("engine", ENGINES)
def test_enough_of_the_drawn_runs_have_a_plan(engine: str) -> None:
    texts = [path.read_text() for path in GOLDEN.glob(f"{engine}-*.txt")]
    assert sum(text.count("\n  steps ") for text in texts) >= 50


if __name__ == "__main__":
    engine, number = sys.argv[1], int(sys.argv[2])
    asked: tuple[Config, Facts] = run(engine, number)
    print(codec.dumps(asked[0]))
    print(codec.dumps(asked[1]))
    print(planner.plan(*asked))
    print("\n".join(lines(engine, number)))
