"""A momentum copy that a forward moves, as MoCo's or BYOL's: lost where weights are gathered for it, and told."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero import GatheredParameters
from torch import nn

import prepkit as pk
from prepkit.findings import RunRefused
from tests.support.gang import Gang


class Momentum(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.q, self.k = how, nn.Linear(4, 8), nn.Linear(4, 8)
        self.k.load_state_dict(self.q.state_dict())
        self.k.requires_grad_(requires_grad=False)

    @torch.no_grad()
    def move(self, how: str) -> None:
        for new, old in zip(self.q.parameters(), self.k.parameters(), strict=True):
            match how:
                case "data":
                    old.data.mul_(0.5).add_(new.data, alpha=0.5)
                case "replaced":
                    old.data = old.data * 0.5 + new.data * 0.5
                case _:
                    old.mul_(0.5).add_(new, alpha=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how != "after":
            self.move(self.how)
        return (self.q(x) - self.k(x) - 1).square().mean()  # type: ignore[no-any-return]


def trained(rank: int, world: int, engine: Any, how: str) -> tuple[str, list[float], int]:
    """What it raises and what notes it, the copy as it is exported, and the hooks that are left."""
    del rank, world
    torch.manual_seed(0)
    model = Momentum(how)
    optimizer = torch.optim.SGD(model.q.parameters(), lr=0.1)
    ready = pk.apply(pk.build_plan(pk.Config(engine=engine, device="cpu"), model, optimizer=optimizer))
    try:
        for _ in range(4):
            ready.backward(ready.model(torch.arange(4.0).reshape(1, 4)))
            ready.step()
            if how == "after":
                ready.unwrap().move(how)
    except (RunRefused, RuntimeError) as error:
        return "\n".join((str(error), *getattr(error, "__notes__", ()))), [], len(ready._looks._units)
    whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in ready.unwrap().k.parameters()]
    return "", torch.cat([value.reshape(-1) for value in whole]).tolist(), len(ready._looks._units)


@pytest.mark.parametrize("engine", [pk.FSDP2(), pk.FSDP1()], ids=["fsdp2", "fsdp1"])
@pytest.mark.parametrize("how", ["data", "replaced", "in place"])
def test_what_a_forward_writes_into_gathered_weights_is_refused(gang2: Gang, engine: Any, how: str) -> None:
    said = [what for what, _, _ in gang2.run(trained, engine, how, timeout=60)]
    assert all("run.written-in-forward at model" in what for what in said), said
    assert all("engine=DDP()" in what for what in said), said


MOVES = """
from contextlib import nullcontext as alone
from deepspeed.runtime.zero import GatheredParameters
import torch

def train(ready, window, model):
    for _ in range(2):
        window(ready)
        with torch.no_grad(), {around}:
            for new, old in zip(model.q.parameters(), model.k.parameters()):
                old.data.mul_(0.5).add_(new.data, alpha=0.5)
"""
AROUND = {"empty": "alone()", "gathered": "GatheredParameters([*model.parameters()], modifier_rank=0)"}


def window(ready: Any) -> None:
    ready.backward(ready.model(torch.arange(4.0).reshape(1, 4)))
    ready.step()


def moved_behind_the_step(rank: int, world: int, stage: Any, around: str, folder: str) -> tuple[list[str], list[float]]:
    """What is told of the program, and the copy."""
    del world
    torch.manual_seed(0)
    model = Momentum("after")
    engine = pk.DeepSpeed(stage=stage, micro_batch=1)
    optimizer = torch.optim.SGD(model.q.parameters(), lr=0.1)
    ready = pk.apply(pk.build_plan(pk.Config(engine=engine, device="cpu"), model, optimizer=optimizer))
    program = Path(folder, f"moves-{rank}.py")
    program.write_text(MOVES.format(around=AROUND[around]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runpy.run_path(str(program))["train"](ready, window, ready.unwrap())
    told = [str(one.message) for one in caught if program.name in str(one.message)]
    with GatheredParameters([*ready.unwrap().k.parameters()]):
        return told, torch.cat([one.detach().reshape(-1) for one in ready.unwrap().k.parameters()]).tolist()


def test_a_copy_that_is_moved_while_zero_3_has_it_empty_is_told(gang2: Gang, tmp_path: Path) -> None:
    (told, lost), (nothing, _) = gang2.run(moved_behind_the_step, 3, "empty", str(tmp_path), timeout=120)
    assert nothing == []
    assert len(told) == 1
    assert told[0].startswith("warning run.mixes-empty at model: ")
    assert "moves-0.py:11: old.data.mul_(0.5).add_(new.data, alpha=0.5) meets empty tensors" in told[0]
    (told, kept), _ = gang2.run(moved_behind_the_step, 3, "gathered", str(tmp_path), timeout=120)
    assert told == []
    (told, whole), _ = gang2.run(moved_behind_the_step, 2, "empty", str(tmp_path), timeout=120)
    assert told == []
    assert kept == pytest.approx(whole, abs=1e-6)
    assert lost != pytest.approx(whole, abs=1e-3)


def test_it_is_right_under_ddp_and_under_fsdp2_behind_the_step(gang2: Gang) -> None:
    for engine, how in ((pk.DDP(), "in place"), (pk.FSDP2(), "after")):
        expected = reference(how)
        for what, copy, hooks in gang2.run(trained, engine, how, timeout=60):
            assert (what, hooks) == ("", 0)
            assert copy == pytest.approx(expected, abs=1e-6)


def reference(how: str) -> list[float]:
    torch.manual_seed(0)
    model = Momentum(how)
    for _ in range(4):
        model(torch.arange(4.0).reshape(1, 4)).backward()
        with torch.no_grad():
            for param in model.q.parameters():
                assert param.grad is not None
                param.sub_(param.grad, alpha=0.1)
                param.grad = None
        if how == "after":
            model.move(how)
    return torch.cat([param.reshape(-1) for param in model.k.parameters()]).tolist()  # type: ignore[no-any-return]
