"""FSDP2's own settings."""

from __future__ import annotations

import pytest

from prepkit.config import FSDP2, Config
from prepkit.testing.tiny import tiny_facts
from tests.support.rule_findings import mended, rule_ids


@pytest.mark.parametrize(
    ("size", "fires"), [(True, 0), (False, 0), (2, 0), (4, 0), (1, 1), (8, 1), (3, 1), (0, 1), (-2, 1), (16, 1)]
)
def test_a_number_to_reshard_to_is_a_proper_factor_of_the_shard_size(size: bool | int, fires: int) -> None:
    cfg = Config(engine=FSDP2(reshard_after_forward=size))
    assert rule_ids(cfg, tiny_facts(world=8)) == ["reshard.not-a-factor"] * fires


@pytest.mark.parametrize("asked", [True, False, 2, 4])
def test_what_the_shard_size_allows_is_left_as_it_is(asked: bool | int) -> None:
    cfg = Config(engine=FSDP2(reshard_after_forward=asked))
    assert mended("reshard.not-a-factor", cfg, tiny_facts(world=8)) == cfg


@pytest.mark.parametrize(("asked", "mends_to"), [(1, False), (8, True), (3, True)])
def test_a_number_that_is_no_factor_is_mended_to_what_torch_reads_in_it(asked: int, mends_to: bool) -> None:
    cfg = Config(engine=FSDP2(reshard_after_forward=asked))
    assert mended("reshard.not-a-factor", cfg, tiny_facts(world=8)).engine == FSDP2(reshard_after_forward=mends_to)
