"""The strict reader of JSON text and the two ways to write it."""

from __future__ import annotations

import json

import pytest

from prepkit.codec.text import _WIDTH, Json, brief, canonical, inside, parse, readable, shown
from prepkit.findings import PlanRejected


def refused(text: str) -> list[tuple[str, str, str]]:
    with pytest.raises(PlanRejected) as caught:
        parse(text, "f.json:$")
    return [(found.rule, found.where, found.what) for found in caught.value.findings]


def test_damage_is_reported_with_line_and_column() -> None:
    assert refused('{"a": 1,\n "b" 2}') == [
        ("codec.damaged", "f.json:$", "not JSON at line 2, column 6: Expecting ':' delimiter")
    ]


def test_a_key_that_appears_twice_is_reported_with_its_object() -> None:
    assert refused('{"a": [0, {"b": 1, "b": 1}], "c": {"d": 2, "d": 3, "d": 4}}') == [
        ("codec.duplicate-key", "f.json:$.a[1]", "the key 'b' appears 2 times"),
        ("codec.duplicate-key", "f.json:$.c", "the key 'd' appears 3 times"),
    ]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000])
def test_a_number_that_no_value_holds_is_reported_with_its_place(number: str) -> None:
    assert [(rule, where) for rule, where, _ in refused(f'{{"a": [0, {number}]}}')] == [
        ("codec.wrong-value", "f.json:$.a[1]")
    ]


def test_all_flaws_are_reported_in_their_order() -> None:
    text = '{"b": [NaN, 1, {"x": 1, "x": 1}, Infinity], "a": 1e999}'
    assert [where for _, where, _ in refused(text)] == ["f.json:$.b[0]", "f.json:$.b[2]", "f.json:$.b[3]", "f.json:$.a"]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000])
def test_nesting_without_end_is_reported_and_does_not_crash(text: str) -> None:
    assert [rule for rule, _, _ in refused(text)] == ["codec.damaged"]


def test_a_flaw_below_deep_nesting_is_found() -> None:
    depth = 400
    text = "[" * depth + "NaN" + "]" * depth
    assert refused(text)[0][1] == "f.json:$" + "[0]" * depth


def test_readable_text_is_the_same_data_one_item_to_a_line() -> None:
    data: Json = {
        "short": [1, 2],
        "rows": [{"name": "n" * 80, "n": i} for i in range(3)],
        "deep": {"x": ["y" * 100, 1]},
    }
    text = readable(data)
    assert json.loads(text) == data
    assert sum('"name"' in line for line in text.splitlines()) == 3


def test_equal_data_in_another_order_has_one_canonical_text() -> None:
    assert canonical({"b": 1, "a": [True, None]}) == canonical({"a": [True, None], "b": 1}) == '{"a":[true,null],"b":1}'


def test_messages_quote_values_shortly() -> None:
    assert len(shown("x" * 1000)) < 80
    assert len(shown([["x" * 1000] * 1000] * 1000)) == 120
    assert shown(10**5000) == "an integer of 16610 bits"
    assert len(brief(["x" * 1000])) == 120
    assert inside("$", "a.b") == "$['a.b']"


def test_a_number_of_4000_digits_is_read_and_a_longer_one_is_not() -> None:
    assert parse("9" * 4000, "$") == int("9" * 4000)
    assert refused("9" * 4001) == [("codec.wrong-value", "f.json:$", "a number of 4001 digits")]


def test_beside_what_json_does_not_have_numbers_of_more_than_4096_bits_are_told() -> None:
    with pytest.raises(PlanRejected) as caught:
        canonical([float("nan"), 2**4096, 2**4096 - 1])
    assert [found.where for found in caught.value.findings] == ["$[0]", "$[1]"]


@pytest.mark.parametrize("indent", ["", "   "])
def test_a_list_stays_on_one_line_up_to_the_width_of_the_page_and_no_further(indent: str) -> None:
    fits = [["x" * (_WIDTH - len(indent) - len('[[""]]'))]]
    assert readable(fits, indent) == canonical(fits)
    assert len(indent + readable(fits, indent)) == _WIDTH
    assert readable([[fits[0][0] + "x"]], indent).count("\n") == 2
