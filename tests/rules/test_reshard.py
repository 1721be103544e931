"""FSDP2's own settings."""

from __future__ import annotations

import pytest

from prepkit.config import FSDP2, Config
from prepkit.testing.tiny import tiny_facts
from tests.support.rule_findings import rule_ids


@pytest.mark.parametrize(
    ("size", "fires"), [(True, 0), (False, 0), (2, 0), (4, 0), (1, 1), (8, 1), (3, 1), (0, 1), (-2, 1), (16, 1)]
)
def test_a_number_to_reshard_to_is_a_proper_factor_of_the_shard_size(size: bool | int, fires: int) -> None:
    cfg = Config(engine=FSDP2(reshard_after_forward=size))
    assert rule_ids(cfg, tiny_facts(world=8)) == ["reshard.not-a-factor"] * fires
