"""XLA through a recording double of torch_xla's exact calls."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import prepkit as pk
from prepkit import config
from prepkit.applying.rehearse import rehearse_here
from prepkit.applying.step_kinds import KINDS
from prepkit.applying.verification import verify
from prepkit.config import XLA, CheckpointBlocks, Clip, ClipNorm, ClipValue, Config, KeepLoaders
from prepkit.objects.state import inspect
from prepkit.objects.target import Target
from prepkit.observe.env import WORLD_SIZE, observe_env
from prepkit.steps import MoveToXLA, ReduceXLAGradients
from prepkit.training.prepared import Prepared
from tests.support import library_doubles
from tests.support.fp8_model import Wide, loss_of, planned, seeded, stepped
from tests.support.fragile_model import applied
from tests.support.gang import Gang
from tests.support.single_step import do, problems, undo
from tests.training.test_prepared import MICRO, WINDOWS, batches, fresh, plain_loop
from tests.training.test_prepared import loss_of as tokens_loss

CFG = Config(engine=XLA(), loaders=KeepLoaders())


@pytest.mark.parametrize("forked", [False, True])
def test_a_forked_process_moves_through_the_wrapper_and_others_by_themselves(
    monkeypatch: pytest.MonkeyPatch, forked: bool
) -> None:
    calls = library_doubles.torch_xla(monkeypatch)
    model = seeded()
    target = Target(model=model)
    do(MoveToXLA(forked=forked), target)
    assert calls == [("xla_device",), *([("MpModelWrapper.to", "cpu")] if forked else [])]
    assert target.model is model


@pytest.mark.parametrize("replaces", [True, False])
def test_the_optimizer_follows_its_parameters_by_name_with_its_state(
    monkeypatch: pytest.MonkeyPatch, replaces: bool
) -> None:
    library_doubles.torch_xla(monkeypatch, replaces=replaces)
    model = seeded()
    optimizer = stepped(model)
    before = dict(model.named_parameters())
    made = planned(evolve(CFG, checkpointing=CheckpointBlocks()), model, optimizer, world_size=2)
    assert [type(one.step).__name__ for one in made.steps] == [
        "MoveToXLA",
        "CheckpointModules",
        "RebindOptimizer",
        "ReduceXLAGradients",
    ]
    applied(made, model, optimizer)
    after = list(model.parameters())
    assert (after[0] is before["embed.weight"]) is not replaces
    assert [id(param) for group in optimizer.param_groups for param in group["params"]] == [id(p) for p in after]
    assert all("exp_avg" in optimizer.state[param] for param in after)
    assert len(optimizer.state) == len(after)
    assert model.head.weight is model.embed.weight


def test_gradients_are_averaged_once_before_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = library_doubles.torch_xla(monkeypatch, world=4)
    model = seeded()
    made = planned(evolve(CFG, optimizer=config.SGD(lr=1.0)), model, world_size=4)
    target = applied(made, model)
    optimizer: Any = target.optimizer
    loss_of(target.model).backward()
    weight = model.get_parameter("layers.1.inner.weight")
    assert weight.grad is not None
    before, gradient = weight.detach().clone(), weight.grad.clone()
    found: list[bool] = []
    optimizer.register_step_pre_hook(lambda *_: found.append("all_reduce" in [call[0] for call in calls]))
    optimizer.step()
    assert found == [True]
    reduced = [call for call in calls if call[0] == "all_reduce"]
    assert reduced == [("all_reduce", "sum", len(list(model.parameters())), 0.25)]
    torch.testing.assert_close(weight.detach(), before - gradient)


def test_one_process_reduces_nothing() -> None:
    model = seeded()
    made = planned(CFG, model, SGD(model.parameters(), lr=0.1))
    assert "ReduceXLAGradients" not in [type(one.step).__name__ for one in made.steps]


@pytest.mark.parametrize(("started", "world", "asked"), [(True, 4, True), (False, 1, False)])
def test_the_processes_of_torch_xla_are_counted_once_it_has_started_them(
    monkeypatch: pytest.MonkeyPatch, started: bool, world: int, asked: bool
) -> None:
    for name in WORLD_SIZE:
        monkeypatch.delenv(name, raising=False)
    calls = library_doubles.torch_xla(monkeypatch, world=4, started=started)
    assert observe_env().world_size == world
    assert (("world_size",) in calls) is asked  # its first answer is its last


def test_a_plan_for_the_processes_of_torch_xla_is_applied_and_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WORLD_SIZE:
        monkeypatch.delenv(name, raising=False)
    calls = library_doubles.torch_xla(monkeypatch, world=4)
    silent = evolve(KINDS[MoveToXLA], checked_by="steps.nothing")
    monkeypatch.setitem(KINDS, MoveToXLA, silent)  # the double's device is the CPU
    model = seeded()
    cfg = evolve(CFG, precision=config.BF16(), accumulation=2, overrides=("xla.library-missing",))
    ready = pk.apply(pk.build_plan(cfg, model, optimizer=stepped(model)))
    assert ready.plan.world_size == 4
    before = model.get_parameter("layers.1.inner.weight").detach().clone()
    for _ in range(4):
        ready.backward(loss_of(ready.model))
        ready.step()
    assert [call[0] for call in calls].count("all_reduce") == 2  # once per step, not per micro-batch
    assert not torch.equal(model.get_parameter("layers.1.inner.weight"), before)


@pytest.mark.parametrize("replaces", [True, False])
def test_the_way_back_gives_the_same_tensors(monkeypatch: pytest.MonkeyPatch, replaces: bool) -> None:
    library_doubles.torch_xla(monkeypatch, replaces=replaces)
    model = seeded()
    before = dict(model.named_parameters())
    values = {name: param.data for name, param in before.items()}
    target = Target(model=model)
    memo = do(MoveToXLA(forked=True), target)
    undo(MoveToXLA(forked=True), target, memo)
    assert all(before[name] is param for name, param in model.named_parameters())
    assert all(values[name].data_ptr() == param.data_ptr() for name, param in model.named_parameters())
    optimizer = SGD(model.parameters(), lr=0.1)
    watched = Target(model=model, optimizer=optimizer)
    undo(ReduceXLAGradients(), watched, do(ReduceXLAGradients(), watched))
    assert not optimizer._optimizer_step_pre_hooks


def test_a_move_that_fails_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    library_doubles.torch_xla(monkeypatch)
    model = seeded()
    before = dict(model.named_parameters())

    def half(self: torch.nn.Module, *_: Any) -> torch.nn.Module:
        self.get_submodule("layers.0.inner").weight = torch.nn.Parameter(torch.zeros(1))
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.nn.Module, "to", half)
    with pytest.raises(RuntimeError, match="out of memory"):
        do(MoveToXLA(forked=False), Target(model=model))
    assert all(before[name] is param for name, param in model.named_parameters())


def test_an_optimizer_on_another_device_than_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library_doubles.torch_xla(monkeypatch)
    away = SGD([torch.nn.Parameter(torch.ones(1, device="meta"))], lr=0.1)
    (text,) = problems(MoveToXLA(forked=False), Target(model=Wide(), optimizer=away))
    assert text == (
        "optimizer.foreign-parameters at optimizer: holds parameters on meta, the model's are on cpu; "
        "Build the optimizer from model.parameters() after the last move."
    )


def test_without_the_library_or_without_an_optimizer_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    (text,) = problems(MoveToXLA(forked=False), Target(model=Wide()))
    assert text.startswith("xla.library-missing at torch_xla: cannot be imported: ")
    with pytest.raises(RuntimeError, match=r"plan\.model-changed at optimizer"):
        act(ReduceXLAGradients(), Target(model=Wide()))


def act(step: ReduceXLAGradients, target: Target) -> None:
    KINDS[ReduceXLAGradients].handler.do(step, target)


def clipped(rank: int, world: int, how: Clip) -> tuple[dict[str, torch.Tensor], list[float], int]:
    """Weights and norms after training over processes whose double of torch_xla reduces over gloo, and its calls."""
    reduced = []

    def all_reduce(kind: str, inputs: list[torch.Tensor], scale: float = 1.0) -> None:
        reduced.append(kind)
        for tensor in inputs:
            dist.all_reduce(tensor)
            tensor.mul_(scale)

    with pytest.MonkeyPatch.context() as patch:
        library_doubles.torch_xla(patch, world=world)
        patch.setattr(sys.modules["torch_xla.core.xla_model"], "all_reduce", all_reduce)
        model, optimizer = fresh()
        scheduler = StepLR(optimizer, 1, 0.5)
        made = planned(evolve(CFG, accumulation=MICRO, clip=how), model, optimizer, world_size=world)
        target = applied(made, model, optimizer, scheduler=scheduler)
        given = {"optimizer": target.optimizer, "scheduler": scheduler, "whole_gradients": target.whole_gradients}
        ready = Prepared(model=target.model, plan=made, **given)
        norms = []
        for window in batches():
            for tokens in window:
                ready.backward(tokens_loss(ready.model, tokens.chunk(world)[rank]))
                ready.step()
            norms += [] if ready.grad_norm is None else [float(ready.grad_norm)]
    return {name: p.detach() for name, p in ready.model.named_parameters()}, norms, len(reduced)


@pytest.mark.parametrize("how", [ClipNorm(0.05), ClipValue(0.01)], ids=["norm", "value"])
def test_xla_processes_clip_what_they_have_averaged(gang2: Gang, how: Clip) -> None:
    expected, expected_norms = plain_loop(how)
    for weights, norms, reduced in gang2.run(clipped, how):
        assert reduced == WINDOWS  # once per window: not again in the optimizer's step
        assert norms == pytest.approx(expected_norms, rel=1e-5)
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)


def test_what_is_not_on_xla_or_not_watched_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    library_doubles.torch_xla(monkeypatch)
    model = seeded()
    optimizer = SGD(model.parameters(), lr=0.1)
    made = planned(CFG, model, optimizer, world_size=2)
    target = applied(made, model, optimizer)
    told = [f"{one.where}: {one.what}" for one in verify(made, target).failed]
    assert len(told) == 1
    assert told[0].startswith("MoveToXLA: everything is on xla: embed.weight is on cpu")
    optimizer._optimizer_step_pre_hooks.clear()
    assert [f"{one.where}: {one.what}" for one in verify(made, target).failed][1:] == [
        "ReduceXLAGradients: gradients are averaged before each step: the optimizer has no pre-step hook"
    ]
    target.whole_gradients = None
    assert verify(made, target).failed[-1].what.endswith("nobody averages what is clipped")
    there = {"w": SimpleNamespace(device=SimpleNamespace(type="xla"))}
    found = KINDS[MoveToXLA].verify(MoveToXLA(forked=False), evolve(inspect(target), params=there, buffers={}))  # type: ignore[arg-type]  # a tensor's device is all that is looked at
    assert list(found) == []


def test_a_rehearsal_says_that_there_is_no_xla_device() -> None:
    model = seeded()
    seen = rehearse_here(planned(CFG, model, SGD(model.parameters(), lr=0.1), world_size=4), model)
    assert seen.fine, str(seen)
    assert [one.step for one in seen.omitted if one.index >= 0] == ["MoveToXLA", "ReduceXLAGradients"]
