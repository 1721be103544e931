"""Every error of the audit that a program here makes does harm: a number comes out wrong, or the program ends."""

from __future__ import annotations

import math

import pytest

from tests.audit.harms import HARMS, Harm, Seen, seen


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
