"""Every error of the running half does harm: a number comes out wrong, or the program ends."""

from __future__ import annotations

import math

import pytest

from tests.audit.harms import HARMS, Harm, Seen, seen
from tests.audit.harms_in_torch import SLIPS, Slip
from tests.audit.harms_of_ranks import HARMS_OF_RANKS, seen_over_ranks
from tests.audit.slips_of_ranks import SLIPS_OF_RANKS, both_ways
from tests.support.gang import Gang


def label(harm: Harm) -> str:
    return harm.make.__name__


def alike(a: Seen, b: Seen) -> bool:
    return a == b if isinstance(a, str) or isinstance(b, str) else math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-9)


@pytest.mark.parametrize("harm", HARMS, ids=label)
def test_an_error_changes_a_number_and_its_mended_twin_has_the_right_one(harm: Harm) -> None:
    for library in harm.library.split(", "):
        pytest.importorskip(library)
    right, wrong = seen(harm.mended, harm.measure), seen(harm.make, harm.measure)
    assert isinstance(right, float), right
    assert math.isfinite(right)
    assert alike(right, seen(harm.mended, harm.measure)), "the mended program is not the same twice"
    assert not alike(wrong, right), f"{harm.rule} does no harm here: {wrong} both ways"


@pytest.mark.parametrize("at", range(len(HARMS_OF_RANKS)), ids=[harm.make.__name__ for harm in HARMS_OF_RANKS])
def test_an_error_of_two_ranks_changes_a_number_and_its_mended_twin_has_the_right_one(gang2: Gang, at: int) -> None:
    for wrong, right in gang2.run(seen_over_ranks, at):
        assert isinstance(right, float), right
        assert math.isfinite(right)
        assert not alike(wrong, right), f"{HARMS_OF_RANKS[at].rule} does no harm here: {wrong} both ways"


@pytest.mark.parametrize("slip", SLIPS, ids=[slip.rule for slip in SLIPS])
def test_a_slip_of_a_loop_changes_a_number(slip: Slip) -> None:
    pytest.importorskip("transformers" if slip.rule in ("run.samples-odd", "run.text-odd") else "torch")
    right = slip.right()
    assert math.isfinite(right)
    assert alike(right, slip.right()), "what is right is not the same twice"
    assert not alike(wrong := slip.wrong(), right), f"{slip.rule} does no harm here: {wrong} both ways"


@pytest.mark.parametrize("at", range(len(SLIPS_OF_RANKS)), ids=[slip.rule for slip in SLIPS_OF_RANKS])
def test_a_slip_of_two_ranks_changes_a_number(gang2: Gang, at: int) -> None:
    found = gang2.run(both_ways, at, timeout=60)
    assert all(isinstance(right, float) and math.isfinite(right) for _, right in found), found
    assert any(not alike(wrong, right) for wrong, right in found), f"{SLIPS_OF_RANKS[at].rule} does no harm: {found}"
