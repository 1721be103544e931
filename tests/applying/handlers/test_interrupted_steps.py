"""A step that is interrupted in its middle puts back what stood there, and lets the interruption pass."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.optim import AdamW
from torch.utils.data import DataLoader

from prepkit.applying.handlers import swap_layers
from prepkit.applying.step_kinds import handlers
from prepkit.objects.target import Target
from prepkit.steps import (
    CheckpointModules,
    ConvertOptimizer,
    ConvertSyncBatchNorm,
    CreateGradScaler,
    ReleaseOptimizer,
    ShardLoader,
    Step,
    WrapLoader,
)
from tests.support.deepspeed_cpu import lean
from tests.support.fragile_model import Tiny
from tests.support.single_step import do, fake_group


class Interrupting(list[Any]):
    """A list of loaders whose first change is interrupted just after it."""

    interrupted = False

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index, value)
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "step",
    [
        ShardLoader(index=0, shuffle=False, seed=3, drop_last=False),
        WrapLoader(index=0, device=None, ends_window=False, evaluation=False),
    ],
)
def test_an_interrupted_loader_is_the_given_one_again(step: Step) -> None:
    given = DataLoader([1, 2, 3, 4], batch_size=2)
    target = Target(model=nn.Identity(), loaders=Interrupting([given]))
    with fake_group(2), pytest.raises(KeyboardInterrupt):
        do(step, target)
    assert target.loaders == [given]


class Interrupted(Target):
    """A target one of whose attributes is interrupted just after a step has set it."""

    __slots__ = ("armed",)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == getattr(self, "armed", None):
            self.armed = None
            raise KeyboardInterrupt


BATCH_NORM = nn.BatchNorm1d(2)
CASES = {
    "scaler": CreateGradScaler(
        device="cpu", sharded=False, init_scale=2.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=1
    ),
    "model": ConvertSyncBatchNorm(paths=("",)),
}


@pytest.mark.parametrize("changed", CASES)
def test_what_an_interrupted_step_has_set_is_taken_back(changed: str) -> None:
    target = Interrupted(model=BATCH_NORM)
    target.armed = changed
    with pytest.raises(KeyboardInterrupt):
        handlers()[type(CASES[changed])].do(CASES[changed], target)
    assert target.scaler is None
    assert target.model is BATCH_NORM


def test_modules_that_were_checkpointed_before_a_failure_are_taken_back() -> None:
    model = Tiny()
    step = CheckpointModules(paths=("layers.0", "nowhere"), preserve_rng_state=True)
    with pytest.raises(KeyError, match="nowhere"):
        handlers()[CheckpointModules].do(step, Target(model=model))
    assert not any(isinstance(module, CheckpointWrapper) for module in model.modules())
    assert torch.is_tensor(model(torch.zeros(1, 5, dtype=torch.long)))


class Stubborn(dict[str, Any]):
    """Children of a module of which the second cannot be replaced, once."""

    refused = False

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "1" and not self.refused:
            self.refused = True
            raise KeyboardInterrupt
        super().__setitem__(key, value)


def test_layers_that_were_exchanged_before_an_interruption_are_taken_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = list(model)
    vars(model)["_modules"] = Stubborn(model._modules)
    with pytest.raises(KeyboardInterrupt):
        swap_layers.swap(model, ("0", "1"), lambda layer: nn.Linear(2, 2))
    assert list(model) == before


class Forgetful(dict[str, Any]):
    """Released state that is interrupted by its second entry, once."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if len(self) == 2:
            raise KeyboardInterrupt


def test_state_that_was_released_before_an_interruption_is_the_optimizers_again() -> None:
    model = nn.Linear(2, 2)
    optimizer = AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = {id(param): dict(state) for param, state in optimizer.state.items()}
    target = Target(model=model, optimizer=optimizer, released=Forgetful())
    with pytest.raises(KeyboardInterrupt):
        do(ReleaseOptimizer(slots=(("weight", "bias"),)), target)
    assert {id(param): dict(state) for param, state in optimizer.state.items()} == before
    assert optimizer.param_groups[0]["params"] == [model.weight, model.bias]


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="the extra prepkit[deepspeed] is not installed")
def test_an_optimizer_whose_conversion_is_interrupted_is_the_given_one_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lean()
    monkeypatch.setattr("deepspeed.ops.adam.DeepSpeedCPUAdam", lambda groups, **options: AdamW(groups))
    model = nn.Linear(2, 2)
    given = AdamW(model.parameters())
    target = Interrupted(model=model, optimizer=given)
    target.armed = "optimizer"
    with pytest.raises(KeyboardInterrupt):
        do(ConvertOptimizer(algorithm="DeepSpeedCPUAdam", decoupled=True), target)
    assert target.optimizer is given
