"""Activation checkpointing."""

from __future__ import annotations

import pytest
from attrs import evolve

from prepkit.config import CheckpointBlocks, CompileBlocks, CompileModel, Config
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


@pytest.mark.parametrize(
    ("how", "ids"),
    [
        (CheckpointBlocks(every=1), []),
        (CheckpointBlocks(every=2), []),
        (CheckpointBlocks(every=3), ["checkpoint.every"]),  # of two blocks
        (CheckpointBlocks(every=0), ["checkpoint.every"]),
        (CheckpointBlocks(every=-1), ["checkpoint.every"]),
        (CheckpointBlocks(keep_ops=("aten.mm", "aten.mm.default", "torch_attn._varlen_attn")), []),
        (CheckpointBlocks(keep_ops=("mm", "aten.mm.", "a b.c", "aten.mm.default.x", "")), ["checkpoint.operator"] * 5),
    ],
)
def test_what_is_recomputed_is_a_block_and_what_is_kept_has_an_operator_s_name(
    how: CheckpointBlocks, ids: list[str]
) -> None:
    assert rule_ids(Config(checkpointing=how), tiny_facts(tiny_model())) == ids


def test_what_is_offloaded_comes_from_a_device_and_is_not_compiled() -> None:
    facts = tiny_facts(tiny_model(), device="cuda")
    how = CheckpointBlocks(offload=True)
    assert rule_ids(Config(checkpointing=how), facts) == []
    assert rule_ids(Config(checkpointing=how, device="cpu"), facts) == ["checkpoint.offload-on-cpu"]
    assert rule_ids(Config(checkpointing=evolve(how, keep_ops=("aten.mm",))), facts) == ["checkpoint.kept-on-device"]
    for compiled in (CompileModel(), CompileBlocks()):
        assert rule_ids(Config(checkpointing=how, compile=compiled), facts) == ["checkpoint.offload-compiled"]
        assert rule_ids(Config(checkpointing=CheckpointBlocks(), compile=compiled), facts) == []
