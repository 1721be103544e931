"""Laws of the codec: the round trip is the identity, digests tell values apart, and what does not fit is refused."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepkit import codec
from prepkit.codec import field_types as codec_shapes
from prepkit.codec.text import inside
from prepkit.findings import Finding, PlanRejected
from prepkit.plan import Plan
from prepkit.testing import plans
from property_tests.support.any_value import MODULES, classes, neighbours, values
from tests.support.sample_plan import sample_plan

each_module = pytest.mark.parametrize("module", MODULES)

PLAN = sample_plan()
FILE = codec.plan_to_text(PLAN)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def findings(data: object, cls: Any) -> tuple[Finding, ...]:
    try:
        codec.from_data(data, cls)
    except PlanRejected as rejected:
        return rejected.findings
    return ()


def places(data: Any, where: str = "$") -> Iterator[tuple[str, Any]]:
    """Every object and list item and field of the data, with its path."""
    yield where, data
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from places(value, inside(where, key))


# --- values --------------------------------------------------------------------------------------------------------


@each_module
@given(data=st.data())
def test_the_round_trip_through_json_is_the_identity(module: str, data: st.DataObject) -> None:
    cls = data.draw(classes(module))
    value = data.draw(values(cls))
    read: Any = codec.from_data(json.loads(codec.dumps(value)), cls)
    assert (read, repr(read)) == (value, repr(value))


@given(plans())
def test_the_round_trip_through_the_plan_file_is_the_identity(plan: Plan) -> None:
    text = codec.plan_to_text(plan)
    assert repr(codec.plan_from_text(text)) == repr(plan)
    assert codec.plan_to_text(codec.plan_from_text(text)) == text


@each_module
@given(data=st.data())
def test_the_digest_changes_when_and_only_when_the_value_does(module: str, data: st.DataObject) -> None:
    cls = data.draw(classes(module))
    a, b = data.draw(neighbours(cls))
    assert (codec.digest(a) == codec.digest(b)) == (repr(a) == repr(b))


@given(value=values(Plan))
def test_one_walk_gives_the_digests_of_plan_and_model(value: Plan) -> None:
    assert codec.plan_digests(value) == (codec.digest(value), codec.digest(value.facts.model))


# --- what does not fit ---------------------------------------------------------------------------------------------


@given(value=values(Plan), data=st.data())
def test_an_unknown_key_anywhere_is_a_finding_at_its_path(value: Plan, data: st.DataObject) -> None:
    form = codec.to_data(value)
    where, holder = data.draw(st.sampled_from([(at, item) for at, item in places(form) if isinstance(item, dict)]))
    key = data.draw(st.text(max_size=4).filter(lambda key: key not in holder))
    holder[key] = None
    assert [(found.rule, found.where) for found in findings(form, Plan)] == [
        ("codec.unknown-key", inside(where, key))
    ]  # fmt: skip


@given(value=values(Plan), data=st.data())
def test_an_unknown_kind_anywhere_is_a_finding_at_its_path(value: Plan, data: st.DataObject) -> None:
    form = codec.to_data(value)
    tagged = [(at, item) for at, item in places(form) if isinstance(item, dict) and "kind" in item]
    where, holder = data.draw(st.sampled_from(tagged))
    holder["kind"] = data.draw(st.sampled_from(["Engine", "", "single", None, 3, ["FSDP2"], {}]))
    assert [(found.rule, found.where) for found in findings(form, Plan)] == [
        ("codec.unknown-kind", inside(where, "kind"))
    ]


@each_module
@given(data=st.data())
def test_a_missing_key_takes_its_default_or_is_a_finding(module: str, data: st.DataObject) -> None:
    cls = data.draw(classes(module))
    value = data.draw(values(cls))
    for field in codec_shapes.fields(cls):
        form = codec.to_data(value)
        del form[field.name]
        if field.default is attrs.NOTHING:
            (found,) = findings(form, cls)
            assert (found.rule, found.where) == ("codec.missing-key", inside("$", field.name))
        else:
            assert codec.from_data(form, cls) == attrs.evolve(value, **{field.name: field.default})


@each_module
@given(data=st.data())
def test_any_json_is_read_exactly_or_refused_with_paths(module: str, data: st.DataObject) -> None:
    cls, form = data.draw(classes(module)), data.draw(JSON)
    found = findings(form, cls)
    assert all(each.where.startswith("$") and each.what and each.fix for each in found)
    if not found:
        value: Any = codec.from_data(form, cls)
        assert codec.from_data(codec.to_data(value), cls) == value


@given(value=values(Plan), wrong=JSON, data=st.data())
def test_a_wrong_value_in_one_place_is_found_there_or_fits(value: Plan, wrong: Any, data: st.DataObject) -> None:
    form = codec.to_data(value)
    spots = [(at, item) for at, item in places(form) if isinstance(item, dict | list) and item]
    where, holder = data.draw(st.sampled_from(spots))
    key: Any = data.draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
    holder[key] = wrong
    place = inside(where, key)
    owner = place.rpartition(".")[0] if place.endswith(".kind") else place
    for found in findings(form, Plan):
        checks_itself = found.rule == "codec.wrong-value" and place.startswith(found.where)  # names the field in words
        assert found.where.startswith(owner) or checks_itself


# --- plan file -----------------------------------------------------------------------------------------------------


def load(content: bytes) -> Plan | None:
    """The plan, or None where the file is refused; anything else is an error."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_bytes(content)
        try:
            return codec.load_plan(path)
        except PlanRejected:
            return None


@given(st.integers(0, len(FILE.encode()) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_changes_nothing(at: int, flip: int) -> None:
    content = bytearray(FILE.encode())
    content[at] ^= flip
    assert load(bytes(content)) in (None, PLAN)


@given(st.integers(0, len(FILE.encode()) - 2))
def test_a_truncated_file_is_refused(length: int) -> None:
    assert load(FILE.encode()[:length]) is None


@given(st.binary(max_size=200))
def test_a_file_of_anything_is_refused(content: bytes) -> None:
    assert load(content) is None


@given(JSON.filter(lambda number: type(number) is not int or number != codec.FORMAT))
def test_another_format_number_is_refused_before_anything_else(number: object) -> None:
    text = json.dumps({"kind": codec.KIND, "format": number, "plan": "of another shape"})
    with pytest.raises(PlanRejected) as caught:
        codec.plan_from_text(text)
    assert {found.where.split(".")[1][:6] for found in caught.value.findings} == {"format"}


@given(plans(), st.data())
def test_an_edit_of_any_part_is_refused_with_the_part(plan: Plan, data: st.DataObject) -> None:
    text = json.loads(codec.plan_to_text(plan))
    part = data.draw(st.sampled_from(sorted(text["plan"])))
    (field,) = (field for field in codec_shapes.fields(Plan) if field.name == part)
    other = data.draw(values(field.type))
    text["plan"][part] = codec.to_data(attrs.evolve(plan, **{part: other}))[part]
    if repr(other) == repr(getattr(plan, part)):
        assert codec.plan_from_text(json.dumps(text)) == plan
    else:
        with pytest.raises(PlanRejected) as caught:
            codec.plan_from_text(json.dumps(text))
        assert all(found.where.startswith(f"$.plan.{part}") for found in caught.value.findings)
