"""Loaders: which can be divided over the ranks, and what is said of those that are not."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from prepkit.config import DDP, XLA, Config, EachLoader, KeepLoaders, Loaders, ShardLoaders, TensorParallel
from prepkit.facts import Env, LoaderFacts
from prepkit.findings import Severity
from prepkit.rules import check
from prepkit.testing.tiny import tiny_facts, tiny_loader
from tests.support.rule_findings import mended, rule_ids

FOREIGN = tiny_loader(foreign=True, custom_batches=True, batch_size=None, length=None, sampler="custom")


@pytest.mark.parametrize(
    ("loader", "rule"),
    [
        (FOREIGN, "loaders.foreign"),
        (tiny_loader(own_iteration=True), "loaders.own-iteration"),
        (tiny_loader(sampler="distributed"), "loaders.already-distributed"),
        (tiny_loader(iterable=True, divided=True), "loaders.already-distributed"),
    ],
)
def test_a_loader_that_cannot_be_split_is_refused_only_where_it_would_be(loader: LoaderFacts, rule: str) -> None:
    facts = tiny_facts(world=2, loader=loader)
    assert rule_ids(Config(engine=DDP()), facts) == [rule]
    assert not [f for f in check(Config(engine=DDP(), loaders=KeepLoaders()), facts) if f.severity is Severity.ERROR]
    assert rule_ids(Config(), evolve(facts, env=Env())) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"iterable": True, "length": None},
        {"custom_batches": True, "batch_size": None, "batches": 7},
        {"sampler": "custom"},
        {"stateful": True, "name": "StatefulDataLoader"},
        {"batch_size": None},
    ],
)
def test_streams_own_samplers_and_own_batches_are_split(changes: dict[str, Any]) -> None:
    assert rule_ids(Config(engine=DDP()), tiny_facts(world=2, loader=tiny_loader(**changes))) == []


DROPS, EVALUATES = ShardLoaders(drop_last=True), ShardLoaders(purpose="evaluation")


@pytest.mark.parametrize(
    ("length", "batch", "drop", "how", "rules"),
    [
        (64, 32, True, ShardLoaders(), []),
        (63, 32, True, ShardLoaders(), ["loaders.no-batch"]),
        (32, 32, True, EVALUATES, []),
        (31, 32, True, EVALUATES, ["loaders.no-batch"]),
        (62, 32, False, ShardLoaders(), []),
        (1, 1, False, ShardLoaders(), ["loaders.fewer-than-ranks"]),
        (1, 1, False, EVALUATES, []),
        (1, 1, False, DROPS, ["loaders.no-batch", "loaders.fewer-than-ranks"]),
        (0, 1, False, ShardLoaders(), ["loaders.no-batch"]),
        (None, 4, True, ShardLoaders(), []),
    ],
)
def test_every_rank_gets_a_batch(
    length: int | None, batch: int, drop: bool, how: ShardLoaders, rules: list[str]
) -> None:
    loader = tiny_loader(length=length, batch_size=batch, drop_last=drop)
    assert rule_ids(Config(engine=DDP(), loaders=how), tiny_facts(world=2, loader=loader)) == rules


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"length": 0}, "It has no batch now: a loop over it does nothing."),
        ({"length": 3, "drop_last": True}, "It has no batch of 3 samples now: a loop over it does nothing."),
        ({"length": 3}, ""),
        ({"length": 0, "iterable": True}, ""),
        ({"length": None}, ""),
    ],
)
def test_a_loader_without_a_batch_is_warned_of_in_one_process(changes: dict[str, Any], told: str) -> None:
    for how, said in ((ShardLoaders(), told), (KeepLoaders(), "")):
        found = check(Config(loaders=how), tiny_facts(loader=tiny_loader(**changes)))
        assert [(one.rule, one.severity, one.what) for one in found] == [
            ("loaders.no-batch", Severity.WARNING, said) for _ in [0] * bool(said)
        ]


@pytest.mark.parametrize(("batches", "drop", "rules"), [(1, True, ["loaders.no-batch"]), (1, False, []), (2, True, [])])
def test_every_rank_gets_one_of_the_batches_that_stay_whole(batches: int, drop: bool, rules: list[str]) -> None:
    loader = tiny_loader(custom_batches=True, batch_size=None, batches=batches)
    cfg = Config(engine=DDP(), loaders=ShardLoaders(drop_last=drop))
    assert rule_ids(cfg, tiny_facts(world=2, loader=loader)) == rules


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, True),
        ({"iterable": True}, True),
        ({"iterable": True, "divided": True}, False),
        ({"sampler": "distributed"}, False),
        ({"sampler": "custom"}, False),
    ],
)
def test_ranks_that_may_read_the_same_are_told_so(changes: dict[str, Any], said: bool) -> None:
    facts = tiny_facts(world=2, loader=tiny_loader(**changes))
    kept: Loaders = KeepLoaders()
    assert rule_ids(Config(engine=DDP(), loaders=kept), facts) == ["loaders.same-data"] * said
    assert rule_ids(Config(engine=DDP(), loaders=EachLoader((kept,))), facts) == ["loaders.same-data"] * said


def test_tensor_ranks_have_to_read_the_same_so_a_stream_that_is_kept_is_fine() -> None:
    cfg = Config(engine=TensorParallel(), loaders=KeepLoaders())
    kinds: dict[str, dict[str, Any]] = {
        "stream": {"iterable": True},
        "shuffled": {},
        "in order": {"sampler": "sequential"},
    }
    found = {
        name: "loaders.same-data" in rule_ids(cfg, tiny_facts(world=2, loader=tiny_loader(**changes)))
        for name, changes in kinds.items()
    }
    assert found == {"stream": False, "shuffled": True, "in order": False}


def test_under_xla_every_loader_is_kept() -> None:
    facts = evolve(tiny_facts(world=2, loader=tiny_loader()), loaders=(tiny_loader(), tiny_loader()))
    mixed, kept = EachLoader((KeepLoaders(), ShardLoaders())), EachLoader((KeepLoaders(), KeepLoaders()))
    assert "xla.loaders" in rule_ids(Config(engine=XLA(), loaders=mixed), facts)
    assert "xla.loaders" not in rule_ids(Config(engine=XLA(), loaders=kept), facts)


def test_a_loader_that_is_kept_instead_of_split_stays_what_it_was_otherwise() -> None:
    facts = tiny_facts(world=2, loader=tiny_loader(own_iteration=True))
    asked = ShardLoaders(purpose="evaluation", to_device=False, ends_window=False)
    kept = mended("loaders.own-iteration", Config(engine=DDP(), loaders=EachLoader((asked,))), facts).loaders
    assert kept == EachLoader((KeepLoaders(purpose="evaluation", to_device=False, ends_window=False),))
