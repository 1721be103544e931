"""How to test a rule of your own with ``prepkit.testing``: the rule of ``examples/custom_rule.py``."""

from __future__ import annotations

import sys
from pathlib import Path

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from prepkit.config import FSDP2, Config
from prepkit.facts import Facts
from prepkit.rules import RULES, check
from prepkit.testing import legal, tiny_facts

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from custom_rule import HEAD


@given(st.integers(min_value=65, max_value=4096))
def test_it_fires_where_the_head_is_spread_too_thin(world: int) -> None:
    (finding,) = check(Config(engine=FSDP2()), tiny_facts(world=world), rules=(HEAD,))
    assert finding.where == "head.weight"
    assert str(world) in finding.what


@given(legal())
def test_it_is_silent_on_legal_pairs_of_at_most_64_ranks(pair: tuple[Config, Facts]) -> None:
    cfg, facts = pair
    small = evolve(facts, env=evolve(facts.env, world_size=min(64, facts.env.world_size)))
    assert check(cfg, small, rules=(HEAD,)) == ()


@given(legal())
def test_it_stands_beside_the_built_in_rules(pair: tuple[Config, Facts]) -> None:
    ours = [finding for finding in check(*pair, rules=(*RULES, HEAD)) if finding.rule == HEAD.id]
    assert ours == list(check(*pair, rules=(HEAD,)))
