"""Activations of one micro-batch, estimated without data."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType

import prepkit as pk
from prepkit.config import CheckpointBlocks, Config
from prepkit.findings import FindingWarning
from prepkit.plan import Plan
from prepkit.predict import predict
from prepkit.predict.prediction import Label

WIDTH, ROWS, BLOCKS = 64, 32, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(torch.relu(self.up(x)))
        return x + down


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x)
        return made if made.sum() > 0 else -made


CLUSTER = pk.Env.declare(world_size=8, device="cuda", torch="2.13", bf16=True)


def planned(cfg: Config, model: nn.Module) -> Plan:
    return pk.build_plan(cfg, model, env=CLUSTER)


def of(model: nn.Module, **how: object) -> int:
    optimizer = None if "intent" in how else pk.optim.AdamW()
    cfg = Config(engine=pk.FSDP2(), optimizer=optimizer, **how)  # type: ignore[arg-type]
    return pk.activations(planned(cfg, model), model, pk.ExampleInputs(torch.ones(ROWS, WIDTH)))


def test_what_a_block_keeps_for_backward_is_counted_to_the_byte() -> None:
    model = Model()
    row = ROWS * WIDTH * 4
    kept = BLOCKS * (row + 4 * row)  # each block's output, and what ReLU gives, for float32
    assert kept <= of(model) <= kept + 13 * row  # and what passes: gradients of one block, and of one weight
    assert all(param.grad is None and not param.is_meta for param in model.parameters())


def test_torch_s_own_tracker_counts_the_same_where_it_looks() -> None:
    mode = FakeTensorMode()
    with mode:
        model, given = Model(), torch.ones(ROWS, WIDTH)
        tracker = MemTracker()
        tracker.track_external(model, given)
        with tracker:
            model(given).sum().backward()
    snapshots = [s for stats in tracker.memory_tracking.values() for many in stats.snapshots.values() for s in many]
    seen = max(kinds[_MemRefType.ACT] + kinds[_MemRefType.TEMP] for one in snapshots for kinds in one.values())
    assert of(Model()) == pytest.approx(seen, rel=0.1)


def test_checkpointing_and_bfloat16_keep_less() -> None:
    model = Model()
    plain, again, half = of(model), of(model, checkpointing=CheckpointBlocks()), of(model, precision=pk.BF16())
    assert again < 0.6 * plain
    assert half < 0.7 * plain


def test_every_second_block_and_kept_products_keep_more_than_nothing() -> None:
    model = Model()
    plain, again = of(model), of(model, checkpointing=CheckpointBlocks())
    second = of(model, checkpointing=CheckpointBlocks(every=2))
    kept = of(model, checkpointing=CheckpointBlocks(keep_ops=("aten.addmm",)))
    assert again < second < plain
    assert again < kept
    assert of(model, checkpointing=CheckpointBlocks(offload=True)) == again  # its inputs are counted as if they stayed


def test_a_forward_without_backward_keeps_next_to_nothing() -> None:
    assert of(Model(), intent=pk.Intent.INFERENCE) < of(Model()) / 2


def test_a_model_that_looks_at_its_values_is_refused_by_name() -> None:
    model = Branches()
    plan = planned(Config(engine=pk.FSDP2(), optimizer=pk.optim.AdamW()), model)
    with pytest.raises(RuntimeError, match="Branches cannot be run without data"):
        pk.activations(plan, model, pk.ExampleInputs(torch.ones(2, 3)))


def test_an_estimate_counts_in_the_ceiling_and_never_in_what_is_certain() -> None:
    model = Model()
    plan = planned(Config(engine=pk.FSDP2(), optimizer=pk.optim.AdamW()), model)
    without, with_them = predict(plan), predict(plan, 10**6)
    assert with_them.fullest.total() == without.fullest.total() + 10**6
    assert with_them.fullest.floor() == without.fullest.floor()
    (term,) = [term for term in with_them.fullest.terms if term.category == "activations"]
    assert term.label is Label.ESTIMATED
    assert with_them.notes[0].startswith("Activations are an estimate")
    assert without.notes[0].startswith("Activations, ")
    assert "activations not counted" in str(pk.fits(plan, "1GiB"))
    said = str(pk.fits(plan, "1GiB", activations=10**6))
    assert "with 976.56 KiB of activations" in said
    tight = without.fullest.total() + 10**6
    assert pk.fits(plan, tight, activations=10**6)
    assert pk.fits(plan, tight - 1, activations=10**6).verdict == "may not fit"


class Idle(nn.Module):
    """Has a layer that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


def test_what_gets_no_gradient_is_named_because_the_predicted_state_counts_it() -> None:
    model = Idle()
    plan = pk.build_plan(Config(optimizer=pk.optim.AdamW()), model)
    assert any("one that never gets a gradient has none" in note for note in predict(plan).notes)
    said = "forward.no-gradient at idle.weight: 2 trained parameters got no gradient .*: `idle.weight`, `idle.bias`"
    with pytest.warns(FindingWarning, match=said):
        pk.activations(plan, model, pk.ExampleInputs(torch.ones(2, 4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FindingWarning)
        pk.activations(plan, model.used, pk.ExampleInputs(torch.ones(2, 4)))
