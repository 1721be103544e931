"""What becomes of a plan's data in which one value was changed: a refusal, what does not fit, or another plan.

Every value of a few plans is changed in the ways in which people and damage change them. What came of it stands in
``golden/changed_*.txt``, a line for each field and change.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import pytest

from prepkit import codec
from prepkit.codec.consistency import inconsistencies
from prepkit.codec.diff import diff, patch
from prepkit.codec.languages import Language
from prepkit.findings import Finding, PlanRejected
from prepkit.plan import Plan
from prepkit.version import VERSION
from tests.support.drawn_runs import planned
from tests.support.golden import assert_golden
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


def outcome(plan: Plan, data: Any, language: Language) -> tuple[str, str]:
    """In a word, and in full."""
    try:
        found = codec.from_data(data, Plan, language=language)
    except PlanRejected as refusal:
        return _told(refusal.findings)
    if wrong := inconsistencies(found, "$"):
        return _told(wrong)
    changed = diff(plan, found)
    assert patch(plan, changed) == found
    return ("another plan", "\n".join(map(str, changed))) if changed else ("equal", "")


def _told(findings: tuple[Finding, ...]) -> tuple[str, str]:
    return " ".join(dict.fromkeys(one.rule for one in findings)), "\n".join(map(str, findings))


def table(top: str) -> Iterator[str]:
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for plan in islice(plans(), None, None, 3 if top == "facts" else 1):
        data = codec.to_data(plan)
        for number, (path, value) in enumerate(leaves({top: data[top]})):
            where = "".join("[]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")
            for name, other in changes(value).items():
                if other != value or type(other) is not type(value):
                    what = outcome(plan, put(data, path, other), LANGUAGES[number % len(LANGUAGES)])
                    found[f"{where}  {name}"].append(what)
    for line, outcomes in found.items():
        words = " | ".join(dict.fromkeys(word for word, _ in outcomes))
        texts = json.dumps([text.replace(VERSION, "<version>") for _, text in outcomes])
        yield f"{line}: {words} {codec.digest(texts)[-4:]}"


@pytest.mark.parametrize("top", ["config", "facts", "mesh", "steps", "layout", "owners", "provenance", "warnings"])
def test_a_changed_value_of_a_plan_has_the_outcome_that_it_had(top: str) -> None:
    text = "\n".join(table(top)) + "\n"
    assert_golden(GOLDEN / f"changed_{top}.txt", text)
