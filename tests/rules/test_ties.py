"""Tied parameters: refused where two units would hold them."""

from __future__ import annotations

import pytest
from attrs import evolve

from prepkit.config import Wrap, WrapBlocks, WrapPaths
from prepkit.testing.tiny import tiny_model
from tests.support.rule_findings import fsdp2_with, rule_ids


@pytest.mark.parametrize(
    ("wrap", "rules"),
    [
        (WrapBlocks(), []),
        (WrapPaths(("head",)), ["ties.split"]),
        (WrapPaths(("embed", "head")), ["ties.split"]),
        (WrapPaths(("norm",)), []),
    ],
)
def test_a_tie_is_refused_exactly_where_two_units_would_hold_it(wrap: Wrap, rules: list[str]) -> None:
    assert rule_ids(*fsdp2_with(wrap, tiny_model(tied=True))) == rules


def test_a_module_that_is_used_twice_is_no_split_tie() -> None:
    model = evolve(tiny_model(), ties=(("layers.0.attn.weight", "layers.7.attn.weight"),))
    assert rule_ids(*fsdp2_with(WrapBlocks(), model)) == []
