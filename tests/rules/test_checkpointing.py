"""Activation checkpointing."""

from __future__ import annotations

import pytest
from attrs import evolve

from prepkit.config import CheckpointBlocks, Config
from prepkit.facts import ArchitectureFacts
from prepkit.testing.tiny import marked, tiny_facts, tiny_model
from tests.support.rule_findings import rule_ids


def test_a_frozen_embedding_under_reentrant_checkpointing_needs_inputs_that_require_a_gradient() -> None:
    model = marked(tiny_model(frozen=("embed.weight",)), "reentrant", "layers.0")
    assert rule_ids(Config(), tiny_facts(model)) == ["checkpoint.frozen-input"]
    assert rule_ids(Config(), tiny_facts(evolve(model, grad_inputs=True))) == []
    assert rule_ids(Config(), tiny_facts(marked(tiny_model(), "reentrant", "layers.0"))) == []
    assert rule_ids(Config(), tiny_facts(tiny_model(frozen=("embed.weight",)))) == []


@pytest.mark.parametrize(("use_cache", "fires"), [(True, 1), (False, 0), (None, 0)])
def test_a_cache_that_recomputation_would_find_filled_is_a_warning(use_cache: bool | None, fires: int) -> None:
    facts = tiny_facts(evolve(tiny_model(), architecture=ArchitectureFacts(use_cache=use_cache)))
    assert rule_ids(Config(checkpointing=CheckpointBlocks()), facts) == ["checkpoint.cache"] * fires
    assert rule_ids(Config(), facts) == []
