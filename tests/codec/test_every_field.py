"""Every field of every class that a plan may hold, with values that people write there.

``golden/messages.txt`` has the messages about fields of each type, ``golden/header.txt`` those about keys of the file.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any, get_args

import attrs
import pytest

from prepkit import codec
from prepkit.codec import field_types
from prepkit.codec.languages import TAG, Language
from prepkit.findings import PlanRejected
from prepkit.findings.keywords import OTHER_NAMES
from prepkit.version import VERSION
from tests.codec.test_changed_leaves import changes
from tests.support.golden import assert_golden
from tests.support.sample_plan import sample_plan

GOLDEN = Path(__file__).parent / "golden"
LANGUAGES: tuple[Language, ...] = get_args(Language)
CLASSES: dict[str, type] = {cls.__name__: cls for cls in field_types.types() if attrs.has(cls)}
VALUES: tuple[Any, ...] = (
    *(None, True, 0, 3, 2.5, 1e300, -1, 2**63, "", "text", "größer ✓", "true", "no", "3", "None", "auto", "x" * 300),
    *([], ["a"], [1, 2.5], [None], [["a", 1]], {}, {"a": 1}, {TAG: "Nothing"}, {TAG: 3}, {TAG: "WrapPaths"}),
    *("FSDP", "fsdp2", "AdamW", "adamw", "BF16", "bfloat16", "CPU", "ClipNorm", "WrapBlock", "TRAINING", "gloo"),
    *({TAG: "AdamW", "lr": 1}, {"lr": 1e-3, "betas": [0.9, 0.99]}, {TAG: "FSDP2", "wrap": "Block"}, {"max_norm": 1}),
    *({"names": ["a"]}, {"patterns": ["a"], "odd": 2}, [{TAG: "Group"}], [{"names": ["a"]}] * 3, ["a"] * 12),
)
"""Of each kind of JSON, and words of other libraries."""
NAMES = (*OTHER_NAMES, *("no_decay", "param_groups", "wrapp", "stages", "moode", "LR", "beta", "", "x" * 300))
"""Keys that some class does not have."""


def said(data: object, cls: Any, language: Language) -> str:
    """Everything that is said of the data; or the value."""
    try:
        return repr(codec.from_data(data, cls, language=language))
    except PlanRejected as refusal:
        return "\n".join(map(str, refusal.findings))


def union_of(cls: type) -> Any:
    """A union that the class is a member of, or the class."""
    unions = (one for one in field_types.types() if cls in get_args(one) and field_types.kinds(one))
    return min(unions, key=str, default=cls)


def _plain(cls: Any) -> object:
    """Some data that may stand in a required field."""
    options = get_args(cls) if field_types.is_union(cls) else (cls,)
    for value in ("text", 3, 2.5, True, [], None):
        if any(field_types.fits(option, value) for option in options):
            return value
    return {}


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_value_in_a_field_is_kept_as_it_is_or_refused_in_its_place(name: str) -> None:
    cls = CLASSES[name]
    whole = union_of(cls)
    required = {field.name: _plain(field.type) for field in field_types.fields(cls) if field.default is attrs.NOTHING}
    data = {} if whole is cls else {TAG: name}
    for field, (number, value) in product(field_types.fields(cls), enumerate(VALUES)):
        given = {**data, **required, field.name: value}
        try:
            found = codec.from_data(given, whole, language=LANGUAGES[number % len(LANGUAGES)])
        except PlanRejected as refusal:
            places = [one.where for one in refusal.findings]
            assert all(place.startswith("$") for place in places)
            assert any(f".{field.name}" in place or place == "$" for place in places) or required, (given, places)
            continue
        assert codec.from_data(codec.to_data(found), whole) == found


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_key_that_a_class_does_not_have_is_refused_by_name(name: str) -> None:
    cls = CLASSES[name]
    whole = union_of(cls)
    required = {field.name: _plain(field.type) for field in field_types.fields(cls) if field.default is attrs.NOTHING}
    given = {**({} if whole is cls else {TAG: name}), **required, "no_such_key": 3}
    with pytest.raises(PlanRejected) as refused:
        codec.from_data(given, whole)
    assert "no_such_key" in str(refused.value)


SHOWN = ("ClipNorm", "Mesh", "LoadWeights", "Group", "CheckpointBlocks", "DDP", "SGD")


def test_messages_about_values_read_as_they_did() -> None:
    """Of a few classes that have a field of each type: every message once, with the values that lead there."""
    seen: dict[str, list[str]] = defaultdict(list)
    for name in SHOWN:
        cls = CLASSES[name]
        required = {
            field.name: _plain(field.type) for field in field_types.fields(cls) if field.default is attrs.NOTHING
        }
        for field in field_types.fields(cls)[:2]:
            for value in VALUES[::5]:
                text = said({TAG: name, **required, field.name: value}, union_of(cls), "yaml")
                if not text.startswith(f"{name}("):
                    seen[text.replace(VERSION, "<version>")].append(json.dumps(value, ensure_ascii=False)[:40])
    text = "".join(f"{' | '.join(dict.fromkeys(values))}\n{message}\n\n" for message, values in seen.items())
    assert_golden(GOLDEN / "messages.txt", text)


def test_every_key_of_the_file_is_told_as_it_was() -> None:
    whole = json.loads(codec.plan_to_text(sample_plan()))
    cases = {f"without {key}": {k: v for k, v in whole.items() if k != key} for key in whole}
    for key in ("kind", "format", "digest", "digests"):
        cases |= {f"{key} {name}": {**whole, key: value} for name, value in changes(whole[key]).items()}
    for key, value in whole["digests"].items():
        for name, other in changes(value).items():
            cases[f"digests.{key} {name}"] = {**whole, "digests": {**whole["digests"], key: other}}
    cases["odd key"] = {**whole, "odd": 1, "more": 2}

    def told(data: object) -> str:
        try:
            codec.plan_from_text(json.dumps(data))
        except PlanRejected as refusal:
            text = "\n".join(map(str, refusal.findings)).replace(VERSION, "<version>")
            return re.sub(r"(?i)sha256:[0-9a-f.]+", "<digest>", text)
        return "read"

    text = "".join(f"{name}: {told(data)}\n" for name, data in cases.items())
    assert_golden(GOLDEN / "header.txt", text)
