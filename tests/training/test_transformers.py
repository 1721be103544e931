"""Real architectures through every engine: two processes train exactly like one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from torch.distributed.fsdp import FullyShardedDataParallel

import prepkit as pk
from prepkit.objects.names import named_parameters
from tests.support.gang import Gang
from tests.support.transformers_models import FAMILIES, MORE, Batch, build

STEPS = 3
ENGINES: dict[str, pk.Config] = {
    "ddp": pk.Config(engine=pk.DDP()),
    "fsdp2": pk.Config(engine=pk.FSDP2()),
    "fsdp1": pk.Config(engine=pk.FSDP1()),
    "fsdp1-grad-op": pk.Config(engine=pk.FSDP1(sharding="SHARD_GRAD_OP"), checkpointing=pk.CheckpointBlocks()),
    "fsdp1-flat": pk.Config(engine=pk.FSDP1(use_orig_params=False)),
    "fsdp2-checkpointed": pk.Config(engine=pk.FSDP2(), checkpointing=pk.CheckpointBlocks()),
}


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(ready: Any, batch: Batch) -> list[float]:
    losses = []
    for _ in range(STEPS):
        loss = ready.model(**batch).loss
        ready.backward(loss)
        ready.step()
        losses.append(loss.detach())
    return losses


def plain(family: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses and parameters of a hand-written loop over the whole batch in one process."""
    model, batch = build(family)
    optimizer = optimizer_of(model)
    losses = []
    for _ in range(STEPS):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, dict(model.named_parameters())


def compare(rank: int, world: int, family: str, engine: str) -> tuple[float, float, int]:
    """Largest difference of loss and of any parameter from the plain run, and the number of plain parameters left."""
    losses, expected = plain(family)
    model, batch = build(family)
    cfg = ENGINES[engine]
    plan = pk.build_plan(cfg, model, optimizer=optimizer_of(model))
    ready = pk.apply(plan)
    share = {key: value.chunk(world)[rank] for key, value in batch.items()}
    mine = torch.stack(train(ready, share))
    torch.distributed.all_reduce(mine)
    gap = float((mine / world - torch.stack(losses)).abs().max())
    worst, unsharded = 0.0, sum(not hasattr(p, "full_tensor") for p in ready.model.parameters())
    with FullyShardedDataParallel.summon_full_params(ready.model):
        held = named_parameters(ready.model)
        assert held.keys() == expected.keys()
        for name, parameter in held.items():
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            worst = max(worst, float((whole - expected[name]).abs().max()))
    return gap, worst, unsharded


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_train_like_one(gang2: Gang, family: str, engine: str) -> None:
    for gap, worst, unsharded in gang2.run(compare, family, engine, timeout=120):
        assert gap < 1e-5
        assert worst < 1e-5
        assert (unsharded == 0) == engine.startswith("fsdp2")


@pytest.mark.parametrize("family", MORE)
def test_more_families_train_like_one_process_under_fsdp2(gang2: Gang, family: str) -> None:
    for gap, worst, unsharded in gang2.run(compare, family, "fsdp2-checkpointed", timeout=120):
        assert gap < 1e-5
        assert worst < 1e-5
        assert unsharded == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_single_engine_trains_like_a_hand_written_loop(family: str) -> None:
    losses, expected = plain(family)
    model, batch = build(family)
    ready = pk.apply(pk.build_plan(pk.Config(), model, optimizer=optimizer_of(model)))
    assert torch.equal(torch.stack(train(ready, batch)), torch.stack(losses))
    assert all(torch.equal(p, expected[name]) for name, p in ready.model.named_parameters())


def test_a_plan_for_one_family_is_refused_for_another() -> None:
    plan = pk.build_plan(pk.Config(), build("llama")[0])
    other, _ = build("gpt2")
    before = {name: p.clone() for name, p in other.named_parameters()}
    with pytest.raises(pk.PlanRejected, match=r"plan\.other-model"):
        pk.apply(evolve(plan, target=None), model=other)
    assert all(torch.equal(before[name], p) for name, p in other.named_parameters())
