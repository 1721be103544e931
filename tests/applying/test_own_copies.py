"""Ranks that shard copies of their own hold the same values before they do, or all of them say who does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import prepkit as pk
from prepkit.applying.verification import SAMPLED, sampled
from tests.support.deepspeed_cpu import lean
from tests.support.gang import Gang

SHARDS = {"FSDP2": pk.FSDP2(), "FSDP1": pk.FSDP1(), "HSDP": pk.FSDP2()}


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def outcome(engine: Any, model: nn.Module, **options: Any) -> str:
    try:
        pk.apply(pk.build_plan(pk.Config(engine=engine, optimizer=pk.optim.SGD(), **options), model))
    except pk.errors.ApplyHalted as error:
        return str(error)
    return ""


def seeded(rank: int, world: int, name: str) -> str:
    mesh = pk.Mesh(replicate=world // 2, shard=2) if name == "HSDP" else None
    return outcome(SHARDS[name], model_of(seed=int(rank == world - 1)), mesh=mesh)


@pytest.mark.parametrize("name", ["FSDP1", "FSDP2"])
def test_another_seed_on_one_rank_is_refused_before_anything_is_sharded(gang2: Gang, name: str) -> None:
    for text in gang2.run(seeded, name, timeout=60):
        assert "error run.ranks-values at values: the 2 ranks do not hold the same values" in text
        assert "\n  values: " in text
        assert "Write torch.manual_seed(0) before the model is built" in text
        assert "everything is as it was" in text


def test_replicas_of_shards_as_well_and_the_odd_rank_is_named(gang4: Gang) -> None:
    for text in gang4.run(seeded, "HSDP", timeout=90):
        assert "rank 3 of 4 differs from the others" in text
        assert "on ranks 0-2" in text


def ways_out(rank: int, world: int) -> list[str]:
    del world
    return [
        outcome(pk.DDP(), model_of(rank)),  # sends rank 0's
        outcome(pk.FSDP2(), model_of(rank), weights=pk.BroadcastWeights()),
        outcome(pk.FSDP2(), model_of(rank), weights=pk.InitWeights()),
        outcome(pk.FSDP2(), model_of(0)),
    ]


def test_where_somebody_gives_all_ranks_their_values_their_own_do_not_matter(gang2: Gang) -> None:
    assert gang2.run(ways_out, timeout=90) == [[""] * 4] * 2


def said_of(engine: Any, seed: int, **options: Any) -> list[str]:
    """What the attestation has of weights that were overwritten, as it prints it."""
    if isinstance(engine, pk.DeepSpeed):
        lean()
    ready = pk.apply(pk.build_plan(pk.Config(engine=engine, optimizer=pk.optim.SGD(), **options), model_of(seed)))
    said = [line.strip() for line in str(ready.attestation).splitlines() if "run.overwritten-ranks" in line]
    ready.close(keep_group=True)
    return said


def overwritten(rank: int, world: int, engine: Any) -> list[list[str]]:
    odd = int(rank == world - 1)
    asked = {} if isinstance(engine, pk.DeepSpeed) else {"weights": pk.BroadcastWeights()}
    return [said_of(engine, odd), said_of(engine, 0), said_of(engine, 0 if asked == {} else odd, **asked)]


@pytest.mark.parametrize(
    "engine",
    [pk.DDP(), pk.DDP(broadcast_buffers=False), *(pk.DeepSpeed(stage=one, micro_batch=1) for one in (2, 3))],
    ids=["ddp", "ddp without buffers", "zero2", "zero3"],
)
def test_what_the_engine_sends_over_other_weights_is_noted_unless_it_is_asked_for(gang2: Gang, engine: Any) -> None:
    note = "note run.overwritten-ranks at model: Rank 1 had built other weights, and the engine has sent rank 0's."
    assert gang2.run(overwritten, engine, timeout=90) == [[[note], [], []]] * 2


def not_a_number(rank: int, world: int) -> str:
    del world
    model = model_of(0)
    if rank == 1:
        with torch.no_grad():
            model[1].bias.fill_(float("nan"))
    return outcome(pk.FSDP2(), model)


def test_a_rank_whose_weights_are_not_numbers_is_seen(gang2: Gang) -> None:
    assert all("\n  values: " in text for text in gang2.run(not_a_number, timeout=60))


def evaluating(rank: int, world: int) -> str:
    del world
    model = model_of(0)
    model[1].train(rank == 0)
    return outcome(pk.DDP(), model)


def test_evaluation_mode_on_one_rank_is_refused_under_every_engine(gang2: Gang) -> None:
    for text in gang2.run(evaluating, timeout=60):
        assert "\n  training modes: " in text
        assert "error run.ranks-modes at training modes: " in text
        assert "Call model.train(), or model.eval(), for the same modules on every rank" in text


@pytest.mark.parametrize("place", [0, SAMPLED - 1])
def test_the_sample_reaches_from_the_first_element_to_the_last(place: int) -> None:
    model = nn.Linear(1000, 1, bias=False)
    before = sampled(model)
    assert sampled(model) == before
    with torch.no_grad():
        model.weight[0, round(place * 999 / (SAMPLED - 1))] += 1
    assert sampled(model) != before
