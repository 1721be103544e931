"""DDP: communication hooks, unused parameters, batch norms."""

from __future__ import annotations

import pytest
from attrs import evolve

from prepkit.config import DDP, FSDP2, CommHook, CompressHook, Config, Intent, PowerSGDHook
from prepkit.facts import BufferFact
from prepkit.rules.ddp import lost_in_sync
from prepkit.testing.tiny import marked, tiny_facts, tiny_model, with_batchnorm
from tests.support.rule_findings import rule_ids, rule_ids_in


@pytest.mark.parametrize(
    ("hook", "device", "rules"),
    [
        (CompressHook(dtype="float16"), "cpu", []),
        (CompressHook(dtype="bfloat16"), "cpu", ["ddp.hook-dtype"]),
        (CompressHook(dtype="bfloat16"), "cuda", []),
        (CompressHook(dtype="bfloat16"), "xpu", []),
        (CompressHook(dtype="bfloat16"), "npu", ["ddp.hook-dtype"]),
        (PowerSGDHook(wrapper="bfloat16"), "cpu", ["ddp.hook-dtype"]),
        (PowerSGDHook(wrapper="float16"), "cpu", []),
        (PowerSGDHook(start_iter=1), "cpu", ["ddp.powersgd"]),
        (PowerSGDHook(start_iter=0, use_error_feedback=False, warm_start=False), "cpu", []),
        (PowerSGDHook(rank=0, min_compression_rate=0.0), "cpu", ["ddp.powersgd"] * 2),
    ],
    ids=str,
)
def test_a_hook_is_refused_where_torch_would_refuse_it_later(hook: CommHook, device: str, rules: list[str]) -> None:
    assert rule_ids_in(Config(engine=DDP(hook=hook)), device=device) == rules


@pytest.mark.parametrize(
    ("engine", "rules"),
    [
        (DDP(find_unused_parameters=True), ["ddp.reentrant-unused"]),
        (DDP(), []),
        (FSDP2(), []),
    ],
)
def test_unused_parameters_and_reentrant_checkpointing_clash_under_ddp(engine: DDP | FSDP2, rules: list[str]) -> None:
    model = marked(marked(tiny_model(), "checkpointed", "layers.0"), "reentrant", "layers.0")
    assert rule_ids(Config(engine=engine), tiny_facts(model, world=2)) == rules


def test_batch_norms_are_synchronised_where_there_are_any_and_on_accelerators_only() -> None:
    cfg, normed = Config(engine=DDP(sync_batchnorm=True)), with_batchnorm(tiny_model())
    assert rule_ids(cfg, tiny_facts(normed, world=2, device="cuda")) == []
    assert rule_ids(cfg, tiny_facts(normed, world=2)) == ["ddp.sync-batchnorm-on-cpu"]
    assert rule_ids(cfg, tiny_facts(world=2)) == ["ddp.no-batchnorm"]
    inference = evolve(cfg, intent=Intent.INFERENCE)
    assert rule_ids(inference, tiny_facts(normed, world=2, optimizer=False)) == []


def test_what_torch_takes_over_into_a_synchronised_batch_norm_is_not_lost() -> None:
    model = with_batchnorm(tiny_model())
    kept = ("running_mean", "running_var", "num_batches_tracked")
    more = tuple(BufferFact(name=f"norm.{name}", shape=(4,), dtype="float32") for name in (*kept, "median"))
    assert lost_in_sync(evolve(model, buffers=more)) == ("norm.median",)
