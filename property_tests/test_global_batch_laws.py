"""Laws of the global batch: it is reached exactly, or refused with numbers that are."""

from __future__ import annotations

import re

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from prepkit import planner
from prepkit.config import DDP, Config
from prepkit.rules import check, loaders
from prepkit.testing.tiny import tiny_facts, tiny_loader

MICRO = st.integers(1, 12)
RANKS = st.integers(1, 24)


@given(MICRO, RANKS, st.integers(1, 400))
def test_a_plan_takes_as_many_samples_as_were_asked_for_or_every_number_of_the_refusal_is_one_that_can_be(
    micro: int, ranks: int, asked: int
) -> None:
    facts = evolve(tiny_facts(world=ranks), loaders=(tiny_loader(batch_size=micro, length=10**6),))
    cfg = Config(engine=DDP(), global_batch=asked)
    found = check(cfg, facts, loaders.RULES)
    assert bool(found) == bool(asked % (micro * ranks))
    if not found:
        owners = planner.plan(cfg, facts).unwrap().owners
        assert owners.accumulation_steps * micro * ranks == asked == owners.global_batch
        return
    told = found[0].fix
    for whole, steps in re.findall(r"global_batch=(\d+) \(accumulation (\d+)\)", told):
        assert int(whole) == micro * ranks * int(steps)
        assert abs(int(whole) - asked) < micro * ranks
    for other, steps in re.findall(r"(\d+) ranks \(accumulation (\d+)\)", told):
        assert int(other) * micro * int(steps) == asked
    for size, steps in re.findall(r"batch_size=(\d+) \(accumulation (\d+)\)", told):
        assert int(size) * ranks * int(steps) == asked
        assert int(size) < micro
