"""Rehearsal equals plan: what real torch makes of a drawn model, on any rank of any world, is what was predicted.

Plans are made here; rehearsals share one process of their own, so that an example costs milliseconds.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from prepkit import config as c
from prepkit.applying.rehearse import rehearse_here
from prepkit.codec import plan_from_text, plan_to_text
from prepkit.facts import Env, Facts
from prepkit.observe import observe
from prepkit.planner import plan
from prepkit.testing import fitting
from property_tests.support.grown_models import Seed, grow, seeds

PATIENCE_S = 120.0
"""For one rehearsal, on a machine that is busy."""


@pytest.fixture(scope="module")
def stage() -> Iterator[ProcessPoolExecutor]:
    """The process in which rehearsals are held."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def rehearsed(seed: Seed, text: str) -> str:
    """What is not as planned; in the other process."""
    model, optimizer = grow(seed)
    seen = rehearse_here(plan_from_text(text), model, rank=seed.rank, optimizer=optimizer)
    return "" if seen.fine else str(seen)


def facts_of(seed: Seed) -> Facts:
    model, optimizer = grow(seed)
    there = (("torch_xla", "2.9.0"),)
    env = Env(world_size=seed.world, device=seed.device, torch="2.13.0", bf16=True, libraries=there)
    return observe(model, optimizer=optimizer, env=env).facts


@st.composite
def cases(draw: st.DrawFn) -> tuple[Seed, c.Config, Facts]:
    """A model, and a config that suits it."""
    seed = draw(seeds())
    seen = facts_of(seed)
    return seed, draw(fitting(seen)), seen


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=cases())
def test_what_torch_makes_is_what_was_planned(stage: ProcessPoolExecutor, case: tuple[Seed, c.Config, Facts]) -> None:
    seed, cfg, seen = case
    made = plan(cfg, seen)
    event(type(cfg.engine).__name__)
    found = stage.submit(rehearsed, seed, plan_to_text(made.unwrap())).result(PATIENCE_S)
    assert found == "", f"{seed}\n{cfg}\n{found}"
