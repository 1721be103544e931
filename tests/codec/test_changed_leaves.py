"""A plan's data in which one value was changed, as people and damage change them: refused, or another plan."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import pytest

from prepkit import codec
from prepkit.codec import inconsistencies
from prepkit.codec.diff import diff, patch
from prepkit.codec.languages import Language
from prepkit.findings import Finding, PlanRejected
from prepkit.plan import Plan
from tests.support.drawn_part import one_in
from tests.support.drawn_runs import planned
from tests.support.plans import PLANS

GOLDEN = Path(__file__).parent / "golden"
LANGUAGES: tuple[Language, ...] = get_args(Language)
Path_ = tuple[str | int, ...]


def plans() -> Iterator[Plan]:
    yield from (make() for make in PLANS.values())
    yield planned("zero")
    yield planned("fsdp1")


def leaves(data: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Everything below, containers included; of the steps all, of other lists the first two and the last."""
    if path:
        yield path, data
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        if not isinstance(key, int) or path == ("steps",) or key < 2 or key == len(data) - 1:
            yield from leaves(value, (*path, key))


def changes(value: Any) -> dict[str, Any]:
    """Name of a change to the value after it."""
    match value:
        case bool():
            return {"other": not value, "number": int(value), "text": str(value)}
        case int():
            return {"more": value + 1, "none": 0, "less": -1, "half": value + 0.5, "text": str(value), "huge": 2**65}
        case float():
            return {"none": 0.0, "less": -value, "whole": int(value), "text": str(value), "large": 2.0**42}
        case str():
            return {"empty": "", "longer": f"{value}s", "upper": value.upper(), "listed": [value], "number": 3}
        case None:
            return {"number": 0, "object": {}, "text": "x"}
        case list():
            fewer, more = {"fewer": value[:-1]}, {"twice": [*value, *value[-1:]], "turned": value[::-1]}
            return {"empty": [], **(fewer | more if value else {}), "number": 3, "nested": [value]}
        case dict():
            fewer = {f"without {key}": {k: v for k, v in value.items() if k != key} for key in value}
            return {**fewer, "odd key": {**value, "nams": 1}, "other kind": {**value, "kind": "Sharded"}, "list": []}
    raise TypeError(value)


def put(data: Any, path: Path_, value: Any) -> Any:
    found = inner = deepcopy(data)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return found


def findings_or_changes(plan: Plan, data: Any, language: Language) -> tuple[tuple[Finding, ...], bool]:
    """What does not fit in the data, and whether what was read of it is another plan."""
    try:
        found = codec.from_data(data, Plan, language=language)
    except PlanRejected as refusal:
        return refusal.findings, False
    if wrong := inconsistencies(found, "$"):
        return wrong, False
    changed = diff(plan, found)
    assert patch(plan, changed) == found
    assert bool(changed) == (codec.dumps(found) != codec.dumps(plan))
    return (), bool(changed)


FEW = 3
"""One of so many values is changed in a run, and every one in the nightly profile."""

TOPS = ("config", "facts", "mesh", "steps", "layout", "owners", "run", "provenance", "warnings")


@pytest.mark.parametrize("top", TOPS)
def test_a_changed_value_is_refused_in_its_place_or_makes_another_plan(top: str) -> None:
    refused = read = 0
    for plan in islice(plans(), None, None, 3 if top == "facts" else 1):
        data = codec.to_data(plan)
        for number, (path, value) in one_in(FEW, enumerate(leaves({top: data[top]}))):
            for name, other in changes(value).items():
                if other == value and type(other) is type(value):
                    continue
                language = LANGUAGES[number % len(LANGUAGES)]
                wrong, another = findings_or_changes(plan, put(data, path, other), language)
                refused, read = refused + bool(wrong), read + another
                assert all(one.where.startswith("$") and one.fix for one in wrong), (path, name)
                if not wrong and not another:
                    assert _means_the_same(name, value, other), (path, name)
    assert refused
    assert read


def _means_the_same(name: str, value: Any, other: Any) -> bool:
    """A key with its default is left out, a whole number stands for a number, or a class for its name alone."""
    return name.startswith("without ") or (name == "whole" and other == value)
