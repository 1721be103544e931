"""Float16 training with a scaled loss, for real on the CPU, where torch's scaler runs although nobody trains so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from prepkit.applying.handlers import gradients
from prepkit.applying.verification import verify
from prepkit.config import DDP, FP16, FSDP2, ClipNorm, Config, Engine, Single
from prepkit.objects.target import Target
from prepkit.steps import CreateGradScaler
from prepkit.training.prepared import Prepared
from tests.support.fragile_model import TOKENS, Tiny, applied, planned, stepped
from tests.support.gang import Gang
from tests.support.single_step import do, problems, undo

ON_CPU = ("precision.fp16-unsupported",)
"""The rule that these tests overrule: torch computes in float16 on the CPU, slowly."""
HALF = FP16(init_scale=16.0)


def prepare(cfg: Config, world: int = 1, dtype: torch.dtype = torch.float32) -> Prepared:
    torch.manual_seed(3)
    model = Tiny(dtype)
    # AdamW's epsilon is 0 in float16, so that a step in it would leave NaN behind
    fresh = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    optimizer = stepped(model) if dtype == torch.float32 else fresh
    scheduler = StepLR(optimizer, 1, 0.5)
    plan = planned(cfg, model, optimizer, world=world, scheduler=scheduler)
    target = applied(plan, model, optimizer, scheduler=scheduler)
    assert verify(plan, target).failed == ()
    return Prepared(
        model=target.model, optimizer=target.optimizer, scheduler=scheduler, scaler=target.scaler, plan=plan
    )


def loss_of(ready: Prepared) -> Tensor:
    out = ready.model(TOKENS)
    assert out.dtype == torch.float32
    return out.square().mean()


def weights(model: nn.Module) -> list[Tensor]:
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()]


def test_a_step_is_that_of_float32_up_to_rounding_and_the_norm_is_of_unscaled_gradients() -> None:
    half = prepare(Config(precision=HALF, clip=ClipNorm(0.1), overrides=ON_CPU))
    full = prepare(Config(clip=ClipNorm(0.1)))
    for ready in (half, full):
        ready.backward(loss_of(ready))
        assert (ready.step(), ready.skipped) == (True, False)
    assert half.grad_norm is not None
    assert full.grad_norm is not None
    assert float(half.grad_norm) == pytest.approx(float(full.grad_norm), rel=1e-2)
    torch.testing.assert_close(weights(half.model), weights(full.model), rtol=1e-2, atol=2e-3)
    assert half.plan.owners.loss_scaling == "prepkit"


def test_float16_weights_are_trained_through_float32_masters() -> None:
    ready = prepare(Config(precision=HALF, overrides=ON_CPU), dtype=torch.float16)
    before = weights(ready.model)
    ready.backward(loss_of(ready))
    assert ready.step()
    assert {p.dtype for p in ready.model.parameters() if p.requires_grad} == {torch.float32}
    assert not torch.equal(before[0], weights(ready.model)[0])


def overflowing(rank: int, world: int, engine: Engine) -> dict[str, Any]:
    """A window of two micro-batches in which rank 0 alone gets an infinite gradient, then one without."""
    ready = prepare(Config(engine=engine, precision=HALF, accumulation=2, overrides=ON_CPU), world)
    scheduler, scaler = ready.scheduler, ready.scaler
    assert scaler is not None
    before = weights(ready.model)
    found: dict[str, Any] = {"returned": []}
    for bad in (0, 1):
        ready.backward(loss_of(ready) * (torch.inf if bad and rank == 0 else 1.0))
        found["returned"].append(ready.step())
    found |= {"skipped": ready.skipped, "scale": scaler.get_scale(), "ticks": scheduler.last_epoch}
    found["kept"] = all(map(torch.equal, before, weights(ready.model)))
    found["cleared"] = all(p.grad is None for p in ready.model.parameters())
    for _ in range(2):
        ready.backward(loss_of(ready))
        found["returned"].append(ready.step())
    found |= {"skipped later": ready.skipped, "ticks later": scheduler.last_epoch}
    found["moved"] = not all(map(torch.equal, before, weights(ready.model)))
    return found


EXPECTED = {
    "returned": [False, False, False, True],
    "skipped": True,
    "scale": 8.0,
    "ticks": 0,
    "kept": True,
    "cleared": True,
    "skipped later": False,
    "ticks later": 1,
    "moved": True,
}


def test_a_window_that_overflows_steps_neither_optimizer_nor_scheduler_and_halves_the_scale() -> None:
    assert overflowing(0, 1, Single()) == EXPECTED


@pytest.mark.parametrize("engine", [DDP(), FSDP2()], ids=["ddp", "fsdp2"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(gang2: Gang, engine: Engine) -> None:
    assert gang2.run(overflowing, engine) == [EXPECTED] * 2


SCALER = CreateGradScaler(
    device="cpu", sharded=False, init_scale=8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7
)


def test_the_scaler_has_the_numbers_of_the_step_and_is_taken_back() -> None:
    target = Target(model=Tiny())
    memo = do(SCALER, target)
    assert target.scaler is not None
    assert target.scaler.is_enabled()
    found = (target.scaler.get_scale(), target.scaler.get_growth_factor(), target.scaler.get_backoff_factor())
    assert (*found, target.scaler.get_growth_interval()) == (8.0, 3.0, 0.25, 7)
    undo(SCALER, target, memo)
    assert target.scaler is None
    own: Any = object()
    target.scaler = own
    undo(SCALER, target, do(SCALER, target))
    assert target.scaler is own


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("device", ["cuda", "xpu", "npu", "hpu", "mlu", "musa", "sdaa", "mps"])
def test_every_accelerator_gets_torch_s_scaler_for_its_type(
    monkeypatch: pytest.MonkeyPatch, device: str, sharded: bool
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    for kind in ("GradScaler", "ShardedGradScaler"):
        monkeypatch.setattr(gradients, kind, lambda kind=kind, **given: calls.append((kind, given)))
    step = CreateGradScaler(
        device=device, sharded=sharded, init_scale=2.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=1
    )
    gradients.scaler_do(step, Target(model=Tiny()))
    numbers = {"init_scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1}
    assert calls == [("ShardedGradScaler" if sharded else "GradScaler", {"device": device, **numbers})]


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_a_scaler_that_torch_would_switch_off_is_refused() -> None:
    step = CreateGradScaler(
        device="cuda", sharded=False, init_scale=2.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=1
    )
    (text,) = problems(step, Target(model=Tiny()))
    assert "'cuda': not available here" in text
