"""Loaders: which can be divided over the ranks."""

from __future__ import annotations

import pytest
from attrs import evolve

from prepkit.config import DDP, Config, KeepLoaders
from prepkit.facts import Env
from prepkit.findings import Severity
from prepkit.rules import check
from prepkit.testing.tiny import tiny_facts, tiny_loader
from tests.support.rule_findings import rule_ids


@pytest.mark.parametrize("changes", [{"iterable": True}, {"custom_batches": True}, {"sampler": "custom"}])
def test_a_loader_that_cannot_be_split_is_refused_only_where_it_would_be(changes: dict[str, object]) -> None:
    facts = tiny_facts(world=2, loader=tiny_loader(**changes))
    assert len(rule_ids(Config(engine=DDP()), facts)) == 1
    assert not [f for f in check(Config(engine=DDP(), loaders=KeepLoaders()), facts) if f.severity is Severity.ERROR]
    assert rule_ids(Config(), evolve(facts, env=Env())) == []


@pytest.mark.parametrize(
    ("length", "batch", "drop", "rules"),
    [
        (64, 32, True, []),
        (63, 32, True, []),
        (62, 32, True, ["loaders.no-batch"]),
        (62, 32, False, []),
        (1, 1, False, ["loaders.fewer-than-ranks"]),
        (0, 1, False, ["loaders.no-batch"]),
        (None, 4, True, []),
    ],
)
def test_every_rank_gets_a_batch(length: int | None, batch: int, drop: bool, rules: list[str]) -> None:
    loader = tiny_loader(length=length, batch_size=batch, drop_last=drop)
    assert rule_ids(Config(engine=DDP()), tiny_facts(world=2, loader=loader)) == rules
