"""``ready.evaluating()``: what is different inside, and that nothing is behind it, under every engine."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor, nn

import prepkit as pk
from prepkit.config import Config, Engine
from prepkit.findings import RunRefused
from tests.support.deepspeed_cpu import lean
from tests.support.gang import Gang


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = inputs + self.drop(self.fc(inputs))
        return out


class Frozen(nn.Linear):
    """Keeps to eval mode whatever its parents do, and has been put into train mode by hand."""

    def train(self, mode: bool = True) -> nn.Module:
        return super().train(mode=False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.teacher = Frozen(4, 4)
        self.head = nn.Linear(4, 4)

    def features(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(inputs) + self.teacher(inputs))
        return out


def model() -> Net:
    torch.manual_seed(0)
    net = Net()
    net.layers[1].drop.eval()  # a user's own choice of mode  # type: ignore[union-attr]  # a Block
    net.teacher.training = True
    return net


BATCH = torch.arange(16.0).reshape(4, 4) / 16
CFG = Config(optimizer=pk.optim.SGD(lr=0.1, momentum=0.9), accumulation=2, entry_points=("features",))
UNITS = pk.wrap.WrapPaths(("layers.*",))
ENGINES: dict[str, Engine] = {
    "ddp": pk.DDP(),
    "fsdp1": pk.FSDP1(wrap=UNITS),
    "fsdp2": pk.FSDP2(wrap=UNITS),
    "zero1": pk.DeepSpeed(stage=1, micro_batch=2),
    "zero3": pk.DeepSpeed(stage=3, micro_batch=2),
}


def flags(ready: Any) -> list[bool]:
    return [module.training for module in ready.model.modules()]


def evaluated(ready: Any, answers: list[list[float]]) -> None:
    """One evaluation, in the middle of whatever is under way: forward, a method, and what must not be called."""
    before = flags(ready)
    with ready.evaluating():
        assert not any(module.training for module in ready.unwrap().modules())
        output = ready.model(BATCH)
        assert not output.requires_grad
        assert torch.equal(output, ready.model(BATCH)), "dropout is off"
        answers.append([*output.flatten().tolist(), *ready.model.features(BATCH).flatten().tolist()])
        with pytest.raises(RunRefused, match=r"ready.backward\(\) was called inside ready.evaluating"):
            ready.backward(output.sum())
        with pytest.raises(RunRefused, match=r"ready.step\(\) was called inside ready.evaluating"):
            ready.step()
        with ready.evaluating():  # one within another, as a function that evaluates by itself
            pass
        assert not any(module.training for module in ready.unwrap().modules())
    assert flags(ready) == before
    assert torch.is_grad_enabled()


def trained(rank: int, world: int, engine: Engine, evaluations: int) -> tuple[list[list[float]], list[float], int]:
    """Two windows of random dropout, with an evaluation before, within and after them, or none."""
    if isinstance(engine, pk.DeepSpeed):
        lean()
    ready = pk.apply(pk.build_plan(evolve(CFG, engine=engine), model()))
    torch.manual_seed(7 + rank)
    answers: list[list[float]] = []
    for at in range(4):
        if evaluations:
            evaluated(ready, answers)
        ready.backward(ready.model(BATCH.chunk(world)[rank] + at).square().mean())
        loses = isinstance(engine, pk.FSDP1 | pk.DeepSpeed)
        refused = pytest.raises(RunRefused, match=r"between ready.backward\(\)") if loses else nullcontext()
        with refused, ready.evaluating():
            pass
        if isinstance(engine, pk.FSDP1) and at % 2:
            with pytest.raises(RunRefused, match="FSDP1 loses the gradients of the window"), torch.no_grad():
                ready.model(BATCH)
        ready.step()
    with ready.evaluating():
        return answers, ready.model(BATCH).flatten().tolist(), ready.steps


@pytest.mark.parametrize("name", ENGINES)
def test_an_evaluation_anywhere_in_a_run_changes_nothing_and_answers_as_the_bare_model(gang2: Gang, name: str) -> None:
    plain = gang2.run(trained, ENGINES[name], 0, timeout=120)
    disturbed = gang2.run(trained, ENGINES[name], 1, timeout=120)
    for calm, busy in zip(plain, disturbed, strict=True):
        assert calm[1:] == busy[1:], "to the bit"
        assert busy[2] == 2
    bare = model().eval()
    wanted = [*bare(BATCH).flatten().tolist(), *bare.features(BATCH).flatten().tolist()]
    for ranks in disturbed:
        assert ranks[0][0] == pytest.approx(wanted, abs=1e-5)
        assert ranks[0][-1] != pytest.approx(wanted, abs=1e-3), "it has learnt by then"


class Normed(nn.Module):
    """Batch norm, whose buffers DDP sends before each forward that follows a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.norm(self.fc(inputs))
        return out


def unevenly(rank: int, world: int) -> tuple[list[float], list[float]]:
    """Rank 0 evaluates three batches and rank 1 none; then both train on."""
    torch.manual_seed(0)
    ready = pk.apply(pk.build_plan(Config(engine=pk.DDP(), optimizer=pk.optim.SGD(lr=0.1)), Normed()))
    for at in range(2):
        ready.backward(ready.model(BATCH * (rank + 1) + at).square().mean())
        ready.step()
        with ready.evaluating():
            seen = [ready.model(BATCH) for _ in range(3 * (1 - rank))]
            statistics = ready.unwrap().norm.running_mean.tolist()
    return statistics, seen[0].flatten().tolist() if seen else []


def test_ranks_may_evaluate_as_many_batches_as_they_have_under_ddp_with_the_buffers_of_rank_0(gang2: Gang) -> None:
    first, second = gang2.run(unevenly, timeout=40)
    assert first[0] == second[0]
    assert len(first[1]) == 16
    assert not second[1]


class Averaging(torch.optim.SGD):
    """As schedule-free optimizers do: other weights for evaluation than for training."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["train_mode"] = True

    def _move(self, by: float, *, training: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not training:
                for param in group["params"]:
                    param.data.add_(by)
            group["train_mode"] = training

    def eval(self) -> None:
        self._move(1.0, training=False)

    def train(self) -> None:
        self._move(-1.0, training=True)


def sharded_mode(rank: int, world: int, engine: Engine) -> tuple[float, float, float]:
    """How far the answer to zeros, a bias, lies from where it was: inside, behind it, and after a step by 0."""
    del world
    if isinstance(engine, pk.DeepSpeed):
        lean()
    torch.manual_seed(0)
    given = nn.Linear(4, 4)
    ready = pk.apply(pk.build_plan(Config(engine=engine), given, optimizer=Averaging(given.parameters(), lr=0.0)))
    zeros = torch.zeros(1, 4)

    def answer() -> float:
        with torch.no_grad():
            return float(ready.model(zeros).mean())

    before = answer()
    with ready.evaluating():
        inside = answer() - before
    behind = answer() - before
    ready.backward(ready.model(zeros + rank).sum())
    ready.step()
    return inside, behind, answer() - before


@pytest.mark.parametrize(
    "engine",
    [pk.FSDP1(), pk.FSDP2(), *(pk.DeepSpeed(stage=stage, micro_batch=2) for stage in range(4))],
    ids=["fsdp1", "fsdp2", "zero0", "zero1", "zero2", "zero3"],
)
def test_a_mode_of_an_optimizer_s_own_reaches_the_model_under_every_engine(gang2: Gang, engine: Engine) -> None:
    for found in gang2.run(sharded_mode, engine, timeout=60):
        assert found == pytest.approx((1.0, 0.0, 0.0), abs=1e-5)


def test_an_optimizer_with_a_mode_of_its_own_follows_and_its_weights_are_not_saved_meanwhile(tmp_path: Any) -> None:
    """Behaviour W-7."""
    given = nn.Linear(4, 4)
    optimizer = Averaging(given.parameters(), lr=0.1)
    ready = pk.apply(pk.build_plan(Config(), given, optimizer=optimizer))
    before = given.weight.detach().clone()
    with ready.evaluating():
        assert torch.equal(given.weight, before + 1.0)
        with ready.evaluating():
            assert torch.equal(given.weight, before + 1.0)
        with pytest.raises(RunRefused, match="an optimizer or a module that does more in eval mode"):
            ready.save(str(tmp_path))
    assert torch.allclose(given.weight, before)
    optimizer.eval()
    with ready.evaluating():
        assert torch.allclose(given.weight, before + 1.0)
    assert torch.allclose(given.weight, before + 1.0), "it was in its eval mode, and is left there"
    optimizer.train()
    ready.save(str(tmp_path))


class MergedInEval(nn.Module):
    """An adapter that is added to the weight in eval mode, as loralib's are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2))
        self.added = nn.Parameter(torch.ones(2, 2))

    def train(self, mode: bool = True) -> MergedInEval:
        if mode is not self.training:
            self.weight.data.add_(self.added.data, alpha=-1.0 if mode else 1.0)
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight + self.added if self.training else self.weight)


def test_weights_that_eval_mode_has_merged_are_neither_saved_nor_resumed_meanwhile(tmp_path: Any) -> None:
    ready = pk.apply(pk.build_plan(pk.Config(optimizer=pk.optim.AdamW()), MergedInEval()))
    before = [param.detach().clone() for param in ready.model.parameters()]
    ready.save(str(tmp_path))
    with ready.evaluating():
        for call in (ready.save, ready.resume):
            with pytest.raises(RunRefused, match=r"called inside ready.evaluating\(\), where an optimizer or a module"):
                call(str(tmp_path))
    assert ready.resume(str(tmp_path))
    assert all(map(torch.equal, before, ready.model.parameters()))


def test_what_raises_inside_leaves_everything_as_it_was() -> None:
    ready = pk.apply(pk.build_plan(CFG, model()))
    before = flags(ready)
    with pytest.raises(ZeroDivisionError), ready.evaluating():
        raise ZeroDivisionError
    assert flags(ready) == before
    ready.backward(ready.model(BATCH).mean())
    ready.step()


class Merging(nn.Linear):
    """As LoRA layers that merge in ``eval`` and take it back in ``train``."""

    merged = 0

    def train(self, mode: bool = True) -> nn.Module:
        self.merged += (not mode) * (not self.merged) - mode * self.merged
        return super().train(mode)


def test_modules_that_do_more_in_train_and_eval_are_asked_to() -> None:
    given = nn.Sequential(Merging(4, 4), nn.Linear(4, 4))
    ready = pk.apply(pk.build_plan(evolve(CFG, entry_points=None), given))
    with ready.evaluating():
        assert given[0].merged == 1
    assert given[0].merged == 0
