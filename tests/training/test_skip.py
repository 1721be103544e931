"""A batch that is left out by ``ready.skip()`` trains as plain torch trains without it, under every engine.

Also one whose forward or backward has raised, and was caught: what it has left in torch or DeepSpeed is taken back.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prepkit as pk
from prepkit.config import Engine
from prepkit.findings import FindingWarning, RunRefused
from prepkit.ranks.peers import RankFailed
from tests.support.deepspeed_cpu import lean
from tests.support.gang import Gang, GangError
from tests.support.gang_worker import Returned

READERS = 2
STEPS = 9
LEFT_OUT = {1: "before its backward", 3: "after its backward", 4: "in its forward", 6: "in its backward"}
"""Batches that are not trained on, and where each is left."""
IN_WINDOWS = {0: "in its forward", 3: "in its forward", 5: "in its backward", 7: "in its backward"}
"""The same with windows of two, of which 7 is the second: the first goes with it."""
PROBE = torch.ones(1, 4)
ENGINES: dict[str, Engine] = {
    "DDP": pk.DDP(),
    "FSDP1": pk.FSDP1(wrap=pk.wrap.WrapPaths(("0", "2"))),
    "FSDP1 original": pk.FSDP1(wrap=pk.wrap.WrapPaths(("0", "2")), use_orig_params=True),
    "FSDP2": pk.FSDP2(wrap=pk.wrap.WrapPaths(("0", "2"))),
    "ZeRO 0": pk.DeepSpeed(stage=0, micro_batch=3),
    "ZeRO 2": pk.DeepSpeed(stage=2, micro_batch=3),
    "ZeRO 3": pk.DeepSpeed(stage=3, micro_batch=3),
}


class Full(RuntimeError):
    """As when memory is out."""


class Leaky(torch.autograd.Function):
    """Raises in backward where it is told to."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, where: str) -> Tensor:  # type: ignore[override]
        ctx.where = where
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.where == "in its backward":
            raise Full
        return grad, None


class Middle(nn.Module):
    """Raises between two units, where it is told to."""

    where = ""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.where == "in its forward":
            raise Full
        out: Tensor = Leaky.apply(torch.tanh(inputs), self.where)  # type: ignore[no-untyped-call]
        return out


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), Middle(), nn.Linear(8, 2))


def batch(step: int, reader: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + reader))


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


@cache
def expected(accumulation: int) -> list[float]:
    """One process that has the batches of both readers, and never those that are left out."""
    trained, left_out, held = model(), LEFT_OUT if accumulation == 1 else IN_WINDOWS, 0
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.05)
    for step in range(STEPS):
        if step not in left_out:
            inputs = torch.cat([batch(step, reader) for reader in range(READERS)])
            (loss_of(trained(inputs)) / accumulation).backward()  # type: ignore[no-untyped-call]  # torch has no types
            held += 1
        elif left_out[step] == "in its backward":
            held = 0
            optimizer.zero_grad()
        if held == accumulation:
            held = 0
            optimizer.step()
            optimizer.zero_grad()
    return [round(value, 5) for value in trained(PROBE)[0].tolist()]


def trained(rank: int, world: int, name: str, accumulation: int, tokens: bool) -> list[float]:
    """The same by prepkit; ``tokens``: losses are weighed, and what is left out would count a hundred times."""
    engine = ENGINES[name]
    if isinstance(engine, pk.DeepSpeed):
        lean()
    cfg = pk.Config(engine=engine, optimizer=pk.optim.AdamW(lr=0.05), accumulation=accumulation)
    ready = pk.apply(pk.build_plan(cfg, model()))
    left_out = LEFT_OUT if accumulation == 1 else IN_WINDOWS
    for step in range(STEPS):
        where = Middle.where = left_out.get(step, "")
        try:
            loss = loss_of(ready.model(batch(step, rank)))
            if where != "before its backward":
                ready.backward(loss, **({"mean_over": 300 if where else 3} if tokens else {}))
        except Full:
            assert "in its" in where
            if where == "in its backward":
                with pytest.raises(RunRefused, match=r"loop\.backward-failed(.|\n)*Call ready\.skip\(\)"):
                    ready.step()
        if where:
            ready.skip()
        else:
            ready.step()
    Middle.where = ""
    return [round(value, 5) for value in ready.model(PROBE)[0].tolist()]


@pytest.mark.parametrize(
    ("accumulation", "tokens"), [(1, False), (1, True), (2, False)], ids=["", "weighed", "windows"]
)
@pytest.mark.parametrize("name", ENGINES)
def test_what_is_skipped_is_trained_nowhere(gang2: Gang, name: str, accumulation: int, tokens: bool) -> None:
    one, other = gang2.run(trained, name, accumulation, tokens)
    assert one == other == pytest.approx(expected(accumulation), abs=2e-4)


def test_alone_a_backward_that_raises_is_left_out_by_zero_grad_as_well() -> None:
    ready = pk.apply(pk.build_plan(pk.Config(accumulation=2, optimizer=pk.optim.AdamW()), model()))
    ready.backward(loss_of(ready.model(batch(0, 0))))
    ready.step()
    Middle.where = "in its backward"
    loss = loss_of(ready.model(batch(1, 0)))
    Middle.where = ""
    with pytest.raises(Full):
        ready.backward(loss)
    with pytest.warns(FindingWarning, match=r"micro-batch 2 of 2, .* 1 micro-batch before it"):
        ready.optimizer.zero_grad()  # type: ignore[union-attr]  # there is one
    assert not any(param.grad is not None for param in ready.model.parameters())
    assert [ready.backward(loss_of(ready.model(batch(2, 0)))) or ready.step() for _ in range(2)] == [False, True]


def test_inside_a_window_a_backward_cannot_be_taken_back() -> None:
    ready = pk.apply(pk.build_plan(pk.Config(accumulation=2, optimizer=pk.optim.AdamW()), model()))
    ready.backward(loss_of(ready.model(batch(0, 0))))
    ready.step()
    ready.skip()  # nothing has been added: a batch whose forward failed
    ready.backward(loss_of(ready.model(batch(1, 0))))
    with pytest.raises(RunRefused, match=r"loop\.skipped-inside-window"):
        ready.skip()
    assert ready.step()


def on_one_rank(rank: int, world: int, engine: Engine, accumulation: int) -> tuple[str, str]:
    """What rank 1 is told, which leaves its fifth micro-batch out alone; the seventh both leave out."""
    del world
    cfg = pk.Config(engine=engine, optimizer=pk.optim.SGD(lr=0.05), accumulation=accumulation, timeout_s=4.0)
    ready = pk.apply(pk.build_plan(cfg, model()))
    told = ""
    for step in range(8):
        output = ready.model(batch(step, rank))
        if rank == 1 and step == 4:
            with pytest.raises(RunRefused) as refused:
                ready.skip()
            told = str(refused.value)
        if step == 6:
            ready.skip()
        else:
            ready.backward(loss_of(output))
            ready.step()
    return told, f"{ready.steps} steps"


@pytest.mark.parametrize(("name", "accumulation"), [("DDP", 2), ("FSDP1", 1), ("FSDP2", 1), ("ZeRO 2", 1)])
def test_a_rank_that_leaves_a_batch_out_alone_is_refused_and_may_go_on(
    gang2: Gang, name: str, accumulation: int
) -> None:
    steps = f"{7 // accumulation} steps"
    (of_zero, zero_steps), (of_one, one_steps) = gang2.run(on_one_rank, ENGINES[name], accumulation)
    assert (of_zero, zero_steps, one_steps) == ("", steps, steps)
    assert "error run.ranks-skips at ready.skip(): This rank leaves a micro-batch out, and rank 0 did not" in of_one


def before_its_forward(rank: int, world: int, finds_unused: bool) -> list[float]:
    """Rank 1 has no forward of micro-batch 4, which would be a window of its own, as the last of a pass is."""
    del world
    engine = pk.DDP(find_unused_parameters=finds_unused)
    cfg = pk.Config(engine=engine, optimizer=pk.optim.SGD(lr=0.5), accumulation=2)
    ready = pk.apply(pk.build_plan(cfg, model()))
    for step in range(9):
        with ready.accumulate(last=step == 4):
            output = None if step == 4 and rank == 1 else ready.model(batch(step, rank))
            if ready.ranks.reduce(float(output is None), "max"):
                ready.skip()
            else:
                assert output is not None
                ready.backward(loss_of(output))
                ready.step()
    return [round(value, 5) for value in ready.model(PROBE)[0].tolist()]


@pytest.mark.parametrize("finds_unused", [False, True])
def test_a_forward_of_one_rank_alone_is_left_out_by_both(gang2: Gang, finds_unused: bool) -> None:
    alone = model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    for window in ((0, 1), (2, 3), (5, 6), (7, 8)):
        whole = torch.cat([batch(step, reader) for step in window for reader in range(READERS)])
        loss_of(alone(whole)).backward()  # type: ignore[no-untyped-call]  # torch has no types
        optimizer.step()
        optimizer.zero_grad()
    wanted = [round(value, 5) for value in alone(PROBE)[0].tolist()]
    for found in gang2.run(before_its_forward, finds_unused):
        assert found == pytest.approx(wanted, abs=2e-5)


def ends_instead(rank: int, world: int) -> str:
    """What rank 0 is told where rank 1 has ended before it leaves a batch out."""
    del world
    ready = pk.apply(pk.build_plan(pk.Config(engine=pk.DDP(), optimizer=pk.optim.SGD(lr=0.05)), model()))
    loss = ready.model(batch(0, rank))
    if rank == 1:
        os._exit(0)
    with pytest.raises(RankFailed) as lost:
        ready.skip()
    del loss
    return str(lost.value)


def test_a_rank_that_ends_instead_of_leaving_a_batch_out_is_named(gang2: Gang) -> None:
    with pytest.raises(GangError) as error:
        gang2.run_fresh(ends_instead, timeout=30)
    of_zero, _ = error.value.outcomes
    assert isinstance(of_zero, Returned)
    assert "rank 1 of 2 was lost: its process" in of_zero.value


def test_what_waits_at_the_close_is_warned_of() -> None:
    ready = pk.apply(pk.build_plan(pk.Config(accumulation=2, optimizer=pk.optim.AdamW()), model()))
    ready.backward(loss_of(ready.model(batch(0, 0))))
    ready.step()
    ready.skip()
    with pytest.warns(FindingWarning, match=r"loop\.closed-inside-window.*1 micro-batch of 2"):
        ready.close()
