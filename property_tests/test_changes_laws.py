"""Laws of the diff: nothing between equals, and replay leads to the other plan."""

from __future__ import annotations

import attrs
from hypothesis import given

from prepkit import codec
from prepkit.codec.diff import Set, Splice, diff, patch
from prepkit.plan import Plan
from property_tests.support.any_value import plan_pairs, values


@given(values(Plan))
def test_a_plan_does_not_differ_from_itself(plan: Plan) -> None:
    assert diff(plan, attrs.evolve(plan, target=object())) == ()


@given(plan_pairs())
def test_replaying_the_changes_gives_the_other_plan(pair: tuple[Plan, Plan]) -> None:
    a, b = pair
    assert repr(patch(a, diff(a, b))) == repr(b)


@given(plan_pairs())
def test_there_are_changes_when_and_only_when_the_digests_differ(pair: tuple[Plan, Plan]) -> None:
    a, b = pair
    assert (diff(a, b) == ()) == (codec.plan_digest(a) == codec.plan_digest(b))


@given(plan_pairs())
def test_every_change_changes_something(pair: tuple[Plan, Plan]) -> None:
    for change in diff(*pair):
        match change:
            case Set(before=before, after=after):
                assert repr(before) != repr(after)
            case Splice(removed=removed, added=added):
                assert removed or added
                assert repr(removed) != repr(added)


@given(plan_pairs())
def test_the_way_back_is_as_long_as_the_way_there(pair: tuple[Plan, Plan]) -> None:
    a, b = pair
    assert patch(b, diff(b, a)) == a
