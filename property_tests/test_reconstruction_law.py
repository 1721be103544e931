"""What was prepared is told: of a drawn model, prepared by a drawn config, an audit gives back the plan's steps."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
from attrs import evolve
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from prepkit import config as c
from prepkit.applying.rehearse import staged
from prepkit.auditing.outcome import Audit
from prepkit.auditing.reconstruction import reconstruct
from prepkit.codec import plan_from_text, plan_to_text
from prepkit.facts import Env, Facts
from prepkit.findings import PlanRejected
from prepkit.observe import observe
from prepkit.observe.prepared.look import BEFORE_A_STEP, look
from prepkit.planner import plan
from prepkit.resolve.units import ignored_params
from prepkit.rules.rule import Need
from prepkit.testing import fitting
from property_tests.support.grown_models import Seed, grow, seeds
from tests.support.reconstructed import differences

PATIENCE_S = 120.0
"""For one example, on a machine that is busy."""


@pytest.fixture(scope="module")
def stage() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def unlike(seed: Seed, text: str) -> str:
    """What the audit of the rehearsed plan gets wrong; empty: nothing. Needs a process without a group."""
    model, optimizer = grow(seed)
    plan = plan_from_text(text)
    with staged(plan, model, rank=seed.rank, optimizer=optimizer) as stage:
        if stage.halted:
            return stage.halted
        if plan.config.intent is c.Intent.INFERENCE:
            stage.target.model.eval()
        facts = look(stage.target.model, stage.target.optimizer, needs=BEFORE_A_STEP - {Need.RANKS}, env=plan.facts.env)
    if reasons := reconstruct(facts).reasons:
        return "\n".join(map(str, reasons))
    try:
        told = Audit(facts=facts, findings=()).plan()
    except PlanRejected as refused:
        return str(refused)
    return differences(plan, told)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Seed, c.Config, Facts]:
    """A model on the CPU without an optimizer, and a config that suits it. Values come from the model itself."""
    seed = evolve(draw(seeds()), device="cpu", held="none")
    model, _ = grow(seed)
    facts = observe(model, env=Env(world_size=seed.world, device="cpu", torch="2.13.0", bf16=True)).facts
    return seed, evolve(draw(fitting(facts)), weights=None, device=None), facts


def empty(cfg: c.Config, facts: Facts) -> bool:
    """Whether units hold nothing, because all is ignored: they say neither where they lie nor whether they offload."""
    units = cfg.engine if isinstance(cfg.engine, c.FSDP1 | c.FSDP2) else None
    return units is not None and {param.name for param in facts.model.params} <= ignored_params(units, facts.model)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=cases())
def test_what_was_prepared_is_told(stage: ProcessPoolExecutor, case: tuple[Seed, c.Config, Facts]) -> None:
    seed, cfg, facts = case
    made = plan(cfg, facts)
    if isinstance(cfg.engine, c.XLA) or empty(cfg, facts):
        return
    event(type(cfg.engine).__name__)
    found = stage.submit(unlike, seed, plan_to_text(made.unwrap())).result(PATIENCE_S)
    assert found == "", f"{seed}\n{cfg}\n{found}"
