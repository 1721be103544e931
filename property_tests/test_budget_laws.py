"""Laws of the changes that ``fits`` proposes, for drawn plans and memories into which they do not fit."""

from __future__ import annotations

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from prepkit import planner
from prepkit.config import Config, DeepSpeed
from prepkit.facts import Facts
from prepkit.plan import Plan
from prepkit.planner.budget import LIMIT, Fit, bounds
from prepkit.predict import predict
from prepkit.resolve.deepspeed.data import offloads, stage
from prepkit.testing import fitting, legal
from prepkit.testing.strategies.deepspeed import facts_for_deepspeed
from prepkit.testing.strategies.facts import facts


def _planned(cfg: Config, seen: Facts) -> Plan:
    return planner.plan(cfg, seen).unwrap()


@st.composite
def zeros(draw: st.DrawFn) -> Plan:
    """Plans of the ``DeepSpeed`` engine."""
    seen = draw(facts_for_deepspeed(draw(facts(flawed=False))))
    return _planned(draw(fitting(seen, zero=True)), seen)


@st.composite
def tight(draw: st.DrawFn, plans: st.SearchStrategy[Plan]) -> tuple[Plan, Fit]:
    """A plan and what is said of a memory that is smaller than its ceiling by any share of it."""
    plan = draw(plans)
    made = predict(plan)
    most = bounds(made)[1] if made.classes else 0
    memory = draw(st.integers(most // 3, max(most - 1, 1)) | st.just(max(most - 1, 1)))
    return plan, planner.fits(plan, memory)


def _holds(plan: Plan, fit: Fit) -> None:
    for option in fit.options:
        again = _planned(option.config, plan.facts)
        made = predict(again)
        assert bounds(made) == (option.floor, option.ceiling)
        assert option.ceiling <= fit.memory
        assert (option.sent, option.copied) == (made.sent, made.copied)
        assert planner.fits(again, fit.memory).verdict == "fits"
        known = evolve(plan.facts, env=evolve(plan.facts.env, memory=fit.memory))
        assert not [one for one in planner.over_budget(option.config, known) if one.rule.startswith("memory.")]
    ranks = [option.between + option.copied for option in fit.options]
    assert ranks == sorted(ranks)
    assert len({option.config for option in fit.options}) == len(fit.options) <= LIMIT


@given(tight(legal().map(lambda pair: _planned(*pair))))
def test_every_change_that_is_proposed_fits_when_it_is_planned(found: tuple[Plan, Fit]) -> None:
    _holds(*found)


@given(tight(zeros()))
def test_every_change_of_a_zero_plan_fits_and_is_one_of_stage_offload_bucket_or_precision(
    found: tuple[Plan, Fit],
) -> None:
    plan, fit = found
    _holds(plan, fit)
    was = plan.config.engine
    assert isinstance(was, DeepSpeed)
    for option in fit.options:
        now = option.config.engine
        assert isinstance(now, DeepSpeed)
        assert stage(now) >= stage(was)
        for kind in ("optimizer", "param"):
            assert offloads(now, kind) or not offloads(was, kind)
        first = {line.partition("=")[0].partition(".")[0] for line in option.diff}
        assert first <= {"engine", "precision", "zero_optimization"}
