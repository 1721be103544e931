"""DeepSpeed's CPU optimizers through a double of their classes, and what is said before DeepSpeed is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import LinearLR, SequentialLR, StepLR

from prepkit.objects.target import Target
from prepkit.steps import CastForward, ConvertOptimizer, InitializeDeepSpeed
from tests.support.deepspeed_cpu import lean
from tests.support.single_step import do, fake_group, problems, shard_mesh, undo

pytest.importorskip("deepspeed", reason="the extra prepkit[deepspeed] is not installed")

CONVERT = ConvertOptimizer(algorithm="DeepSpeedCPUAdam", decoupled=True)
INITIALIZE = InitializeDeepSpeed(
    device="cpu",
    data_parallel=1,
    stage=0,
    dtype=None,
    optimizer="given",
    names=("weight", "bias"),
    scheduler="outside",
    settings=(),
)


class Recorded(Optimizer):
    """Takes what ``DeepSpeedCPUAdam`` takes, and compiles nothing."""

    def __init__(self, groups: Any, **options: Any) -> None:
        self.options = options
        super().__init__(groups, {key: value for key, value in options.items() if key != "adamw_mode"})


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    lean()
    for module, name in (
        ("adam", "DeepSpeedCPUAdam"),
        ("adagrad", "DeepSpeedCPUAdagrad"),
        ("lion", "DeepSpeedCPULion"),
    ):
        monkeypatch.setattr(f"deepspeed.ops.{module}.{name}", type(name, (Recorded,), {}))


def two_groups(model: nn.Linear) -> AdamW:
    groups = [{"params": [model.weight], "betas": (0.8, 0.9)}, {"params": [model.bias], "lr": 0.5}]
    return AdamW(groups, lr=0.25, eps=1e-4, weight_decay=0.125)


@pytest.mark.usefixtures("kernels")
def test_the_cpu_optimizer_gets_the_groups_and_the_first_ones_numbers_and_the_scheduler_follows() -> None:
    """Every option that its kernel knows, and none of torch's own."""
    model = nn.Linear(2, 2)
    given = two_groups(model)
    heard: list[str] = []
    given.register_step_pre_hook(lambda *_: heard.append("before"))
    given.register_step_post_hook(lambda *_: heard.append("after"))
    inner = [StepLR(given, 1), LinearLR(given)]
    target = Target(model=model, optimizer=given, scheduler=SequentialLR(given, list(inner), milestones=[1]))
    memo = do(CONVERT, target)
    assert isinstance(target.optimizer, Recorded)
    assert target.optimizer.options == {
        "lr": 0.25,
        "betas": (0.8, 0.9),
        "eps": 1e-4,
        "weight_decay": 0.125,
        "adamw_mode": True,
    }
    first, second = target.optimizer.param_groups
    assert first["params"] == [model.weight]
    assert second["params"] == [model.bias]
    assert (first["lr"], second["lr"]) == (given.param_groups[0]["lr"], given.param_groups[1]["lr"])
    assert not {"foreach", "maximize", "amsgrad", "fused", "decoupled_weight_decay"} & first.keys()
    assert all(schedule.optimizer is target.optimizer for schedule in (target.scheduler, *inner))
    for hook in (
        *target.optimizer._optimizer_step_pre_hooks.values(),
        *target.optimizer._optimizer_step_post_hooks.values(),
    ):
        hook(target.optimizer, (), {})
    assert heard == ["before", "after"]
    undo(CONVERT, target, memo)
    assert target.optimizer is given
    assert all(schedule.optimizer is given for schedule in (target.scheduler, *inner))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion"])
def test_the_class_is_the_one_that_was_planned(name: str) -> None:
    model = nn.Linear(2, 2)
    target = Target(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.25))
    do(ConvertOptimizer(algorithm=name, decoupled=True), target)  # type: ignore[arg-type]  # one of three
    assert type(target.optimizer).__name__ == name


@pytest.mark.usefixtures("kernels")
def test_only_adam_is_told_whether_decay_is_decoupled() -> None:
    model = nn.Linear(2, 2)
    target = Target(model=model, optimizer=Adagrad(model.parameters(), lr=0.25))  # which has state from the start
    do(ConvertOptimizer(algorithm="DeepSpeedCPUAdagrad", decoupled=False), target)
    assert isinstance(target.optimizer, Recorded)
    assert target.optimizer.options == {"lr": 0.25, "eps": 1e-10, "weight_decay": 0}


def test_an_optimizer_with_state_is_not_converted_and_a_fresh_one_is() -> None:
    model = nn.Linear(2, 2)
    target = Target(model=model, optimizer=AdamW(model.parameters()))
    assert problems(CONVERT, target) == ()
    model(torch.ones(1, 2)).sum().backward()
    target.optimizer.step()  # type: ignore[union-attr]  # given above
    (said,) = problems(CONVERT, target)
    assert said == (
        "deepspeed.optimizer-state at optimizer: AdamW has state, which DeepSpeed's CPU form would not take; "
        "Pass a fresh one."
    )


@pytest.mark.parametrize("name", ["Adam", "Adagrad", "Lion"])
def test_a_stale_lock_is_looked_for_on_the_kernel_that_is_compiled(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / f"cpu_{name.lower()}" / "lock"
    lock.parent.mkdir()
    lock.touch()
    step = ConvertOptimizer(algorithm=f"DeepSpeedCPU{name}", decoupled=False)  # type: ignore[arg-type]  # one of three
    (said,) = problems(step, Target(model=nn.Linear(2, 2)))
    assert str(lock) in said


def test_what_is_cast_already_is_not_cast_again() -> None:
    step = CastForward(dtype="bfloat16", output_dtype="float32")
    target = Target(model=nn.Linear(2, 2))
    do(step, target)
    assert problems(step, target) == (
        "model.already-wrapped at model.forward: cast by prepkit already; Apply to a model that was not prepared.",
    )


def test_sharded_parameters_are_not_handed_over() -> None:
    lean()
    model = nn.Linear(2, 2)
    with fake_group(2):
        fully_shard(model, mesh=shard_mesh(2))
        said = problems(INITIALIZE, Target(model=model))
    assert "model.sharded-parameters at weight, bias: DeepSpeed shards whole parameters" in said


def test_another_device_than_deepspeed_works_on_is_said_with_what_to_type() -> None:
    lean()
    said = problems(evolve(INITIALIZE, device="cuda"), Target(model=nn.Linear(2, 2)))
    expected = (
        "deepspeed.accelerator at env.variables.DS_ACCELERATOR: DeepSpeed works on cpu, and the plan computes on cuda; "
        "Type export DS_ACCELERATOR=cuda"
    )
    assert any(text.startswith(expected) for text in said), said


def test_an_engine_is_not_made_an_engine_again() -> None:
    lean()
    from deepspeed import DeepSpeedEngine

    engine = DeepSpeedEngine.__new__(DeepSpeedEngine)
    nn.Module.__init__(engine)
    said = problems(evolve(INITIALIZE, names=()), Target(model=engine))
    assert "model.already-wrapped at model: a DeepSpeed engine already; Give the module inside it, built again." in said


def test_one_optimizer_is_enough() -> None:
    lean()
    model = nn.Linear(2, 2)
    given = Target(model=model, optimizer=AdamW(model.parameters()))
    left_out = "deepspeed.two-optimizers at optimizer: DeepSpeed makes one from its config, and one was given"
    assert left_out in problems(evolve(INITIALIZE, optimizer="section"), given)
    assert left_out not in problems(INITIALIZE, given)
