"""What is said of every field of every class that a plan may hold, with values that people write there.

``golden/fields_<first letter>.txt`` has for each class and field a digest of all that is said, in the four languages,
and ``golden/header.txt`` what is said of the plan file's own keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from string import ascii_uppercase
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


def of_class(name: str) -> Iterator[tuple[str, list[str]]]:
    cls = CLASSES[name]
    whole = union_of(cls)
    required = {field.name: _plain(field.type) for field in field_types.fields(cls) if field.default is attrs.NOTHING}
    tagged = {} if whole is cls else {TAG: name}
    language = iter(LANGUAGES * 1000)
    for field in field_types.fields(cls):
        yield field.name, [said({**tagged, **required, field.name: one}, whole, next(language)) for one in VALUES]
    yield "unknown", [said({**tagged, **required, key: 3}, whole, one) for key in NAMES for one in LANGUAGES[::3]]
    yield "missing", [said(tagged, whole, one) for one in LANGUAGES]
    many = {f"key{number}": number for number in range(12)}
    yield "many", [said({**tagged, **required, **dict(list(many.items())[:some])}, whole, "yaml") for some in (8, 9)]
    if whole is not cls:
        slips = (name.lower(), name[:-1], f"{name}s", {TAG: name.upper()}, {**required}, [name], name)
        yield "its name", [said(slip, whole, one) for slip in slips for one in LANGUAGES]


def _plain(cls: Any) -> object:
    """Some data that may stand in a required field."""
    options = get_args(cls) if field_types.is_union(cls) else (cls,)
    for value in ("text", 3, 2.5, True, [], None):
        if any(field_types.fits(option, value) for option in options):
            return value
    return {}


@pytest.mark.parametrize("letter", ascii_uppercase)
def test_every_field_is_told_as_it_was(letter: str) -> None:
    lines = [
        f"{name}.{field}: {codec.digest(repr(texts).replace(VERSION, '<version>'))[-6:]}"
        for name in sorted(CLASSES)
        if name.startswith(letter)
        for field, texts in of_class(name)
    ]
    if lines:
        assert_golden(GOLDEN / f"fields_{letter}.txt", "\n".join(lines) + "\n")


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
            return re.sub(r"sha256:[0-9a-f.]+", "<digest>", text)
        return "read"

    text = "".join(f"{name}: {told(data)}\n" for name, data in cases.items())
    assert_golden(GOLDEN / "header.txt", text)
