"""Every error of the loop does harm: a number comes out wrong, or torch ends the program."""

from __future__ import annotations

import math

import pytest

from prepkit.findings import RunRefused
from tests.audit.test_harms import alike
from tests.support.gang import Gang
from tests.training.loop_harms import LOOP_HARMS, LoopHarm, prepared, seen, size, torch_after, train
from tests.training.loop_harms_of_ranks import (
    DEEPSPEED_HARMS,
    LOOP_HARMS_OF_RANKS,
    seen_on_rank,
    thrown_away,
)


def label(harm: LoopHarm) -> str:
    return harm.rule


@pytest.mark.filterwarnings("ignore::prepkit.errors.FindingWarning")
@pytest.mark.parametrize("harm", LOOP_HARMS, ids=label)
def test_a_slip_is_refused_and_does_harm_where_it_is_not(harm: LoopHarm) -> None:
    with pytest.raises(RunRefused) as refused:
        harm.slip()
    assert harm.rule in {one.rule for one in refused.value.findings}
    wrong, right = seen(harm)
    assert isinstance(right, float)
    assert math.isfinite(right)
    assert not alike(wrong, right), f"{harm.rule} does no harm here: {wrong} both ways"


def test_the_loop_without_a_slip_comes_to_what_plain_torch_does() -> None:
    ready = prepared(accumulation=2)
    train(ready, 0, 1, 2, 3)
    assert alike(size(ready.model), torch_after([0, 1], [2, 3], divide_by=2)())


@pytest.mark.parametrize("at", range(len(LOOP_HARMS_OF_RANKS)), ids=[harm.rule for harm in LOOP_HARMS_OF_RANKS])
def test_a_slip_of_two_ranks_is_refused_and_does_harm_where_it_is_not(gang2: Gang, at: int) -> None:
    found = gang2.run(seen_on_rank, at, timeout=60)
    rule = LOOP_HARMS_OF_RANKS[at].rule
    assert all(f"error {rule} at " in said for said, _, _ in found), found
    assert any(not alike(wrong, right) for _, wrong, right in found), f"{rule} does no harm here: {found}"


@pytest.mark.parametrize("rule", DEEPSPEED_HARMS)
def test_what_deepspeed_throws_away_on_two_ranks_is_shown_where_it_is_not_refused(gang2: Gang, rule: str) -> None:
    pytest.importorskip("deepspeed")
    for wrong, right in gang2.run(thrown_away, rule, timeout=120):
        assert math.isfinite(float(right))
        assert not alike(wrong, right), f"{rule} does no harm here: {wrong} both ways"
