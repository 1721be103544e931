"""What DDP can be asked for beyond wrapping: device ids of every accelerator, hooks on two ranks, batch norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from prepkit.applying.handlers import ddp as handler
from prepkit.applying.step_kinds import handlers
from prepkit.applying.verification import verify
from prepkit.config import DDP, CommHook, CompressHook, Config, PowerSGDHook
from prepkit.interpreter import Halted, interpret
from prepkit.objects import names
from prepkit.objects.target import Target
from prepkit.planner import pieces
from prepkit.planner.replicated import communication
from prepkit.ranks import launcher
from prepkit.steps import ConvertSyncBatchNorm, DDPCommHook, LocalDevice, WrapDDP
from prepkit.training.prepared import Prepared
from tests.applying.handlers.test_ddp import wrapping
from tests.support.fragile_model import TOKENS, Tiny, applied, planned
from tests.support.gang import Gang
from tests.support.single_step import do, gloo_alone, problems, undo

# --- devices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(set(pieces.COLLECTIVES) - {"cpu"}))
def test_every_accelerator_gets_its_own_index_as_the_one_device_and_the_output_device(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", lambda module, **options: given.update(options))
    # a process that sees one device is on index 0, whatever its local rank (G-25)
    index = type("Device", (), {"type": kind, "index": 5})()
    monkeypatch.setattr(launcher, "bind", lambda device: index)
    handler.wrap_do(wrapping(device=LocalDevice(type=kind)), Target(model=Tiny()))
    assert (given["device_ids"], given["output_device"]) == ([5], 5)


@pytest.mark.parametrize(("wrap", "expected"), [(handler.WRAP, {}), (handler.WITHOUT_VALUES, {"init_sync": False})])
def test_only_a_model_without_values_is_wrapped_without_sending_any(
    monkeypatch: pytest.MonkeyPatch, wrap: Any, expected: dict[str, bool]
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", lambda module, **options: given.update(options))
    wrap.do(wrapping(), Target(model=Tiny()))
    assert {key: value for key, value in given.items() if key == "init_sync"} == expected


def test_a_cpu_and_a_model_that_is_spread_get_none(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", lambda module, **options: given.update(options))
    for device in (LocalDevice(type="cpu"), None):
        handler.wrap_do(wrapping(device=device), Target(model=Tiny()))
        assert (given["device_ids"], given["output_device"]) == (None, None)


# --- hooks ---------------------------------------------------------------------------------------------------------

POWER = PowerSGDHook(start_iter=2, rank=2, min_compression_rate=0.5)
HOOKS: dict[str, CommHook] = {
    "none": None,
    "fp16": CompressHook(dtype="float16"),
    "powersgd": POWER,
    "powersgd-batched-shapes": PowerSGDHook(start_iter=2, batch_tensors_with_same_shape=True),
    "powersgd-plain": PowerSGDHook(start_iter=0, use_error_feedback=False, warm_start=False),
    "fp16-of-powersgd": PowerSGDHook(start_iter=2, wrapper="float16"),
}


def learn(rank: int, world: int, hook: CommHook) -> tuple[list[str], list[float], list[float]]:
    """Failed checks, losses of six steps, and some weights at the end."""
    torch.manual_seed(1)
    model = Tiny()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    made = planned(Config(engine=DDP(hook=hook)), model, optimizer, world=world)
    target = applied(made, model, optimizer)
    failed = [str(one) for one in verify(made, target).failed]
    ready, losses = Prepared(model=target.model, optimizer=optimizer, plan=made), []
    for _ in range(6):
        loss = ready.model(TOKENS.chunk(world)[rank]).square().mean()
        ready.backward(loss)
        assert ready.step()
        losses.append(float(loss.detach()))
    return failed, losses, model.layers[1].inner.weight.flatten().tolist()


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_trains_two_ranks_alike(gang2: Gang, name: str) -> None:
    (failed, losses, one), (_, _, other) = gang2.run(learn, HOOKS[name])
    assert failed == []
    assert one == other
    assert losses[-1] < losses[0]


def test_compressed_gradients_are_near_those_that_are_not_and_not_the_same(gang2: Gang) -> None:
    plain, half, power = (torch.tensor(gang2.run(learn, HOOKS[name])[0][2]) for name in ("none", "fp16", "powersgd"))
    assert 0 < (plain - half).abs().max() < 1e-3
    assert 0 < (plain - power).abs().max() < 0.1


NAMES: list[tuple[CommHook, Callable[..., Any], str | None]] = [
    (CompressHook(dtype="float16"), default_hooks.fp16_compress_hook, None),
    (CompressHook(dtype="bfloat16"), default_hooks.bf16_compress_hook, None),
    (PowerSGDHook(), powerSGD_hook.powerSGD_hook, None),
    (PowerSGDHook(wrapper="float16"), powerSGD_hook.powerSGD_hook, "fp16_compress_wrapper"),
    (PowerSGDHook(wrapper="bfloat16"), powerSGD_hook.powerSGD_hook, "bf16_compress_wrapper"),
]


@pytest.mark.parametrize(("asked", "hook", "wrapper"), NAMES, ids=["fp16", "bf16", "power", "fp16 power", "bf16 power"])
def test_every_hook_that_config_offers_is_torch_s_own(
    monkeypatch: pytest.MonkeyPatch, asked: CommHook, hook: Callable[..., Any], wrapper: str | None
) -> None:
    if wrapper:
        monkeypatch.setattr(default_hooks, wrapper, lambda inner: (wrapper, inner))
    step = communication(asked)
    assert isinstance(step, DDPCommHook)
    with gloo_alone():
        state, found = handler.communication(step)
    assert found == ((wrapper, hook) if wrapper else hook)
    assert (state is None) == isinstance(asked, CompressHook)


def test_the_numbers_of_powersgd_reach_its_state() -> None:
    asked = PowerSGDHook(
        rank=3,
        start_iter=9,
        min_compression_rate=1.5,
        use_error_feedback=False,
        warm_start=False,
        orthogonalization_epsilon=0.25,
        random_seed=4,
        batch_tensors_with_same_shape=True,
    )
    step = communication(asked)
    assert step is not None
    with gloo_alone():
        state, _ = handler.communication(step)
    assert (state.matrix_approximation_rank, state.start_powerSGD_iter, state.min_compression_rate) == (3, 9, 1.5)
    assert (state.use_error_feedback, state.warm_start, state.orthogonalization_epsilon) == (False, False, 0.25)
    assert state.batch_tensors_with_same_shape


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch was built with CUDA, where it takes the hook")
def test_torch_refuses_bfloat16_hooks_here_and_the_model_stays_unwrapped() -> None:
    model = Tiny()
    target = Target(model=model)
    with gloo_alone(), pytest.raises(TypeError, match="NCCL"):
        do(wrapping(hook=DDPCommHook(hook="bf16_compress_hook")), target)
    assert target.model is model


def batched(rank: int, world: int) -> str:
    model = DistributedDataParallel(nn.Linear(32, 32))
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.batched_powerSGD_hook)
    try:
        for _ in range(4):
            model(torch.ones(2, 32)).sum().backward()
    except AssertionError:
        return "AssertionError"
    return "runs"


def test_batched_powersgd_which_config_does_not_offer_still_fails_in_torch(gang2: Gang) -> None:
    """It gives a matrix to a function that takes a stack of them; offer it once this test fails."""
    assert gang2.run(batched) == ["AssertionError"] * 2


# --- unused parameters ---------------------------------------------------------------------------------------------


class Reentrant(Tiny):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return self.head(x)


def test_torch_does_fail_where_the_rule_about_reentrant_checkpointing_refuses() -> None:
    with gloo_alone():
        target = Target(model=Reentrant())
        do(wrapping(find_unused_parameters=True), target)
        with pytest.raises(RuntimeError, match=r"marked as ready twice|mark a variable ready only once"):
            target.model(TOKENS).sum().backward()


# --- batch norms ---------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """One norm that two parents share, and one of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.second = nn.Sequential(nn.Linear(4, 4), self.first[1], nn.BatchNorm1d(4, affine=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


def test_batch_norms_are_converted_in_every_parent_with_the_same_tensors_and_come_back() -> None:
    model = Normed()
    model.first.eval()
    before, held = dict(model.named_modules(remove_duplicate=False)), names.named_parameters(model)
    step, target = ConvertSyncBatchNorm(paths=("first.1", "second.2")), Target(model=model)
    memo = do(step, target)
    assert type(model.first[1]) is type(model.second[2]) is nn.SyncBatchNorm
    assert model.second[1] is model.first[1]
    assert all(held[name] is param for name, param in names.named_parameters(model).items())
    assert (model.first[1].training, model.second[2].training) == (False, True)
    undo(step, target, memo)
    assert dict(model.named_modules(remove_duplicate=False)) == before


def test_a_converted_model_computes_the_same_in_evaluation_and_alone() -> None:
    model = Normed()
    x = torch.randn(6, 4)
    model(x)
    expected = model.eval()(x)
    do(ConvertSyncBatchNorm(paths=("first.1", "second.2")), Target(model=model))
    assert torch.equal(model(x), expected)
    assert model.train()(x).shape == (6, 4)


def test_torch_does_refuse_to_train_a_converted_model_on_the_cpu() -> None:
    model = Normed()
    do(ConvertSyncBatchNorm(paths=("first.1",)), Target(model=model))
    with gloo_alone(), pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on"):
        model(torch.randn(6, 4))


def test_a_model_that_is_a_batch_norm_is_converted_itself() -> None:
    target = Target(model=nn.BatchNorm2d(3))
    memo = do(ConvertSyncBatchNorm(paths=("",)), target)
    assert isinstance(target.model, nn.SyncBatchNorm)
    undo(ConvertSyncBatchNorm(paths=("",)), target, memo)
    assert type(target.model) is nn.BatchNorm2d


def test_what_is_no_plain_batch_norm_is_refused() -> None:
    target = Target(model=Normed())
    do(ConvertSyncBatchNorm(paths=("first.1",)), target)
    assert problems(ConvertSyncBatchNorm(paths=("first.0", "first.1", "nose")), target) == (
        "plan.other-model at nose: the model has no such module",
        "plan.other-model at first.0, first.1: no plain batch norm",
    )


def test_batch_norms_are_found_planned_and_attested() -> None:
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cfg = Config(engine=DDP(sync_batchnorm=True), overrides=("ddp.sync-batchnorm-on-cpu",))
    made = planned(cfg, model, optimizer)
    (step,) = [one.step for one in made.steps if isinstance(one.step, ConvertSyncBatchNorm)]
    assert step.paths == ("first.1", "second.2")
    without = evolve(made, steps=tuple(one for one in made.steps if not isinstance(one.step, WrapDDP)))
    with gloo_alone():
        outcome = interpret(tuple(one.step for one in made.steps), handlers(), Target(model=model, optimizer=optimizer))
        assert isinstance(outcome, Halted)  # DDP itself takes no SyncBatchNorm on the CPU
        assert outcome.clean
        assert type(model.first[1]) is nn.BatchNorm1d
        target = applied(without, model, optimizer)
        assert verify(without, target).failed == ()
        model.second[2] = nn.BatchNorm1d(4, affine=False)
        assert [one.what for one in verify(without, target).failed] == ["synchronised: second.2"]
