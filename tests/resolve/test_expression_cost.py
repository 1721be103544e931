"""Regular expressions that would take for ever are told from those that people write."""

from __future__ import annotations

import re
import time

import pytest

from prepkit.config import LoadWeights
from prepkit.resolve.checkpoint import LONGEST_NAME, cost, renamed, unreadable

USUAL = [
    "^policy[.]",
    r"(.*)[.](\d+)[.](.*)",
    "^(?:model|base_model)[.]",
    r"^layers?[.](?=\d)",
    "(?P<block>h[0-9]{1,3})",
    "x*",
]
EXPLODING = [
    "(a+)+$",
    "(a|a)*$",
    "(a|ab)*c",
    "((a{1,7}){1,7}){1,7}$",
    "(?:x?){30}x{30}",
    "a?" * 30 + "a" * 30,
    "(?=(y+)+z)",
    "(.*)(.*)(.*)(.*)(.*)x",
    "a{0,7}" * 30 + "$",
]


@pytest.mark.parametrize("pattern", USUAL)
def test_an_expression_that_people_write_costs_nothing(pattern: str) -> None:
    assert cost(pattern, "x") == ""
    begun = time.monotonic()
    re.sub(pattern, "x", "a" * LONGEST_NAME)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("pattern", EXPLODING)
def test_an_expression_that_explodes_is_told_without_being_tried(pattern: str) -> None:
    begun = time.monotonic()
    ((named, why),) = unreadable(LoadWeights("x", rename=((pattern, "b"),)))
    assert named == pattern
    assert why.startswith("too costly: ")
    assert time.monotonic() - begun < 10


def test_an_expression_and_a_replacement_have_a_longest_length() -> None:
    assert cost("a" * 1000, "b" * 1000) == ""
    assert cost("a" * 1001, "b").startswith("too long: ")
    assert cost("a", "b" * 1001).startswith("too long: ")


def test_a_name_that_grows_beyond_any_models_is_renamed_no_further() -> None:
    name = renamed(LoadWeights("x", rename=(("(.+)", r"\1\1\1\1\1\1\1\1"),) * 9), "weight")
    assert LONGEST_NAME < len(name) <= 8 * LONGEST_NAME
