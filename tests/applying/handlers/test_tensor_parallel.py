"""Tensor parallelism for real: models cut over gloo processes learn what one process learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import prepkit as pk
from prepkit.objects import names
from tests.support.gang import Gang
from tests.support.tensor_parallel_model import (
    PLAIN_ROWS,
    REPLICATED,
    SEQUENCE_ROWS,
    built,
    optimizer_of,
    toy,
    train,
    whole,
)

STEPS, NORM = 3, 0.05


def compare(rank: int, world: int, family: str, cfg: pk.Config, before: int) -> dict[str, Any]:
    """Differences of losses, norms and parameters from a run in one process, the first ``before`` steps in common."""
    reference, batch = built(family)
    losses, norms = train(reference, optimizer_of(reference), batch, before + STEPS, NORM)
    model, batch = built(family)
    optimizer = optimizer_of(model)
    train(model, optimizer, batch, before, NORM)
    plan = pk.build_plan(evolve(cfg, clip=pk.ClipNorm(NORM)), model, optimizer=optimizer)
    ready = pk.apply(plan)
    readers = world // next((axis.size for axis in plan.mesh if axis.name == "tensor"), 1)
    share = {key: value.chunk(readers)[rank * readers // world] for key, value in batch.items()}
    mine, found, unsettled = [], [], 0
    for _ in range(STEPS):
        loss = ready.model(**share).loss
        ready.backward(loss)
        held = [p for p in ready.model.parameters() if isinstance(p, DTensor) and p.grad is not None]
        unsettled += sum(p.placements != p.grad.placements for p in held)
        ready.step()
        mine.append(loss.detach())
        found.append(ready.grad_norm)
    joint = torch.stack(mine)
    torch.distributed.all_reduce(joint)
    expected = dict(names.named_parameters(reference))
    params = names.named_parameters(ready.model)
    return {
        "loss": float((joint / world - torch.stack(losses[before:])).abs().max()),
        "norm": float((torch.stack(found) - torch.stack(norms[before:])).abs().max()),
        "parameters": max(float((whole(p) - expected[name]).abs().max()) for name, p in params.items()),
        "unsettled gradients": unsettled,
        "frozen": [name for name, p in params.items() if not p.requires_grad]
        != [name for name, p in expected.items() if not p.requires_grad],
        "untied": len(params) - len(expected),
        "cut": sum(isinstance(p, DTensor) for p in params.values()),
    }


def assert_equal_runs(found: list[dict[str, Any]], cut: int) -> None:
    for seen in found:
        assert seen.pop("cut") == cut
        assert all(value < 1e-5 for value in seen.values()), seen


ALONE = pk.Config(engine=pk.TensorParallel())
CASES: dict[str, tuple[str, pk.Config, int]] = {
    "llama": ("llama", evolve(ALONE, checkpointing=pk.CheckpointBlocks()), 23),
    "llama-tied": ("llama-tied", ALONE, 22),
    "llama-compiled": ("llama", evolve(ALONE, compile=pk.CompileBlocks(backend="aot_eager")), 23),
    "qwen3": ("qwen3", ALONE, 20),
    "qwen3-compiled": ("qwen3", evolve(ALONE, compile=pk.CompileBlocks(backend="aot_eager")), 20),
    "by-hand": ("toy", evolve(ALONE, tp_plan=PLAIN_ROWS), 10),
    "sequence": (
        "toy",
        evolve(ALONE, tp_plan=SEQUENCE_ROWS, checkpointing=pk.CheckpointBlocks(offload=True, keep_ops=("aten.mm",))),
        16,
    ),
    "replicated": ("toy", evolve(ALONE, tp_plan=REPLICATED), 16),
}


@pytest.mark.parametrize("case", CASES)
def test_layers_cut_over_two_processes_learn_what_one_process_learns(gang2: Gang, case: str) -> None:
    family, cfg, cut = CASES[case]
    assert_equal_runs(gang2.run(compare, family, cfg, 1, timeout=120), cut)


SHARDED = pk.Config(engine=pk.FSDP2(), mesh=pk.Mesh(shard=2, tensor=2))
BOTH: dict[str, tuple[str, pk.Config, int]] = {
    "llama-tied": ("llama-tied", evolve(SHARDED, checkpointing=pk.CheckpointBlocks()), 29),
    "qwen3": ("qwen3", SHARDED, 25),
    "sequence": ("toy", evolve(SHARDED, tp_plan=SEQUENCE_ROWS), 16),
    "uneven": ("toy-uneven", evolve(SHARDED, tp_plan=PLAIN_ROWS), 16),
}


@pytest.mark.parametrize("case", BOTH)
def test_shards_of_cut_layers_on_four_processes_learn_what_one_process_learns(gang4: Gang, case: str) -> None:
    family, cfg, cut = BOTH[case]
    assert_equal_runs(gang4.run(compare, family, cfg, 1, timeout=180), cut)


# --- precision -----------------------------------------------------------------------------------------------------


def first_loss(rank: int, world: int, cfg: pk.Config) -> tuple[float, float, str]:
    del rank, world
    reference, batch = built("llama")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = reference(**batch).loss
    model, batch = built("llama")
    ready = pk.apply(pk.build_plan(evolve(cfg, precision=pk.BF16()), model, optimizer=optimizer_of(model)))
    out = ready.model(**batch)
    ready.backward(out.loss)
    ready.step()
    return float(expected.detach()), float(out.loss.detach()), str(out.logits.dtype)


@pytest.mark.parametrize("engine", ["alone", "sharded"])
def test_cut_layers_compute_in_bfloat16(gang2: Gang, gang4: Gang, engine: str) -> None:
    gang, cfg = (gang2, ALONE) if engine == "alone" else (gang4, SHARDED)
    for expected, found, dtype in gang.run(first_loss, cfg, timeout=120):
        assert found == pytest.approx(expected, rel=5e-3)
        assert found != pytest.approx(expected, rel=1e-9) or engine == "alone"
        assert dtype == "torch.float32"


# --- data ----------------------------------------------------------------------------------------------------------


def read(rank: int, world: int, cfg: pk.Config) -> list[int]:
    torch.manual_seed(rank)  # what a random sampler would draw differs from rank to rank
    loader = DataLoader(list(range(16)), batch_size=2, shuffle=True)  # type: ignore[arg-type]  # a list is a dataset
    torch.manual_seed(0)
    model, _ = toy()
    ready = pk.apply(pk.build_plan(cfg, model, optimizer=optimizer_of(model), loaders=(loader,)))
    return [int(sample) for batch in ready.loaders[0] for sample in batch]


def test_tensor_ranks_read_the_same_samples_and_shards_their_own(gang2: Gang, gang4: Gang) -> None:
    first, second = gang2.run(read, evolve(ALONE, tp_plan=PLAIN_ROWS))
    assert first == second
    assert sorted(first) == list(range(16)) != first
    one, same, other, likewise = gang4.run(read, evolve(SHARDED, tp_plan=PLAIN_ROWS))
    assert (one, other) == (same, likewise)
    assert sorted(one + other) == list(range(16))


# --- refusals ------------------------------------------------------------------------------------------------------


def seeded_apart(rank: int, world: int) -> tuple[str, bool]:
    del world
    model, _ = toy()
    if rank == 1:
        torch.nn.init.normal_(model.layers[1].up.weight)
    plan = pk.build_plan(evolve(ALONE, tp_plan=PLAIN_ROWS), model)
    with pytest.raises(pk.errors.ApplyHalted) as caught:
        pk.apply(plan)
    return str(caught.value), any(isinstance(p, DTensor) for p in model.parameters())


def test_ranks_with_different_weights_are_told_so_before_a_layer_is_cut(gang2: Gang) -> None:
    for text, cut in gang2.run(seeded_apart):
        assert "run.ranks-values at layers.1.up.weight: the ranks hold different weights" in text
        assert not cut


def arrives_cut(rank: int, world: int) -> tuple[list[str], list[str], list[str], float]:
    del rank, world
    model, batch = toy()
    expected = float(model(**batch).loss.detach())
    ready = pk.apply(pk.build_plan(evolve(ALONE, tp_plan=PLAIN_ROWS), model))
    cut = ready.unwrap(keep_autocast=False, keep_compiled=False)  # as another tool would hand it over
    unsized = [f.rule for f in pk.check(ALONE, cut) if f.severity is pk.Severity.ERROR]
    cut.tp_size = 4
    wrong = [f.rule for f in pk.check(ALONE, cut) if f.severity is pk.Severity.ERROR]
    cut.tp_size = 2
    ddp = [f.rule for f in pk.check(pk.Config(engine=pk.DDP()), cut) if f.severity is pk.Severity.ERROR]
    optimizer = optimizer_of(cut)
    plan = pk.build_plan(ALONE, cut, optimizer=optimizer)
    assert "ParallelizeModules" not in str(plan)
    assert "ReleaseOptimizer" not in str(plan)
    ready = pk.apply(plan)
    loss = ready.model(**batch).loss
    ready.backward(loss)
    ready.step()
    return unsized, wrong, ddp, abs(float(loss.detach()) - expected)


def test_a_model_that_arrives_cut_is_verified_and_not_cut_again(gang2: Gang) -> None:
    for unsized, wrong, ddp, gap in gang2.run(arrives_cut):
        assert unsized == wrong == ["tensor.size-differs"]
        assert ddp == ["model.sharded-parameters"]
        assert gap < 1e-6


def steps_all_at_once(rank: int, world: int) -> tuple[list[str], str]:
    del rank, world
    model, batch = toy()
    cfg = evolve(ALONE, tp_plan=PLAIN_ROWS)
    found = [f.rule for f in pk.check(cfg, model, optimizer=optimizer_of(model, foreach=True))]
    optimizer = optimizer_of(model, foreach=True)
    ready = pk.apply(pk.build_plan(evolve(cfg, overrides=("tensor.mixed-optimizer",)), model, optimizer=optimizer))
    ready.backward(ready.model(**batch).loss)
    with pytest.raises(RuntimeError) as caught:
        ready.step()
    return found, str(caught.value)


def test_an_optimizer_that_steps_all_at_once_is_refused_because_torch_would_in_the_first_step(gang2: Gang) -> None:
    for found, text in gang2.run(steps_all_at_once):
        assert found == ["tensor.mixed-optimizer"]
        assert "mixed torch.Tensor and DTensor" in text
