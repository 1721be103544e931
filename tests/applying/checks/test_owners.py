"""Whoever the plan says scales, counts, clips, ticks and keeps master weights is looked up in what stands there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.amp import GradScaler
from torch.optim.lr_scheduler import StepLR

import prepkit as pk
from prepkit.applying.verification import copies, verify
from prepkit.config import BF16, FP16, Config
from prepkit.planner import plan
from prepkit.steps import CreateGradScaler
from prepkit.testing.tiny import tiny_facts
from tests.support.fragile_model import Tiny, applied, planned, stepped
from tests.support.gang import Gang
from tests.support.tensor_parallel_model import PLAIN_ROWS, toy, whole

ON_CPU = ("precision.fp16-unsupported",)
PLAN = Config().tp_plan


def told(made: Any, target: Any) -> list[str]:
    rules = ("run.other-owners", "run.no-master-weights")
    return [f"{one.where}: {one.what}" for one in verify(made, target).failed if one.rule in rules]


def prepared(cfg: Config, *, scheduled: bool = False) -> tuple[Any, Any]:
    model = Tiny()
    optimizer = stepped(model)
    scheduler = StepLR(optimizer, 1) if scheduled else None
    made = planned(cfg, model, optimizer, scheduler=scheduler)
    return made, applied(made, model, optimizer, scheduler=scheduler)


def test_a_scaler_that_is_missing_or_too_many_is_named() -> None:
    made, target = prepared(Config(precision=FP16(), overrides=ON_CPU))
    assert told(made, target) == []
    target.scaler = None
    assert told(made, target) == ["plan.owners: loss scaling: planned prepkit, found nobody"]
    made, target = prepared(Config())
    target.scaler = GradScaler("cpu")
    assert told(made, target) == ["plan.owners: loss scaling: planned nobody, found prepkit"]


def test_a_scheduler_that_is_gone_is_named() -> None:
    made, target = prepared(Config(), scheduled=True)
    assert told(made, target) == []
    target.scheduler = None
    assert told(made, target) == ["plan.owners: scheduler: planned prepkit, found nobody"]


def test_master_weights_that_are_none_are_named() -> None:
    made, target = prepared(Config(precision=BF16()))
    assert told(made, target) == []
    with torch.no_grad():
        target.model.embed.weight.data = target.model.embed.weight.data.bfloat16()
    (said,) = told(made, target)
    assert said.endswith("where the plan says who keeps them: embed.weight is bfloat16; head.weight is bfloat16.")


LAYERS = pk.tp.TPPlan((pk.tp.TPLayer("layers.*.mlp", "colwise", output_layout="replicate"),))


@pytest.mark.parametrize("engine", [pk.Single(), pk.DDP(), pk.FSDP1(), pk.FSDP2(), pk.TensorParallel()])
def test_every_engine_of_torch_plans_a_scaler_for_float16(engine: Any) -> None:
    world = 1 if isinstance(engine, pk.Single) else 2
    cfg = Config(engine=engine, precision=FP16(), tp_plan=LAYERS if isinstance(engine, pk.TensorParallel) else PLAN)
    made = plan(cfg, tiny_facts(world=world, device="cuda")).unwrap()
    assert made.owners.loss_scaling == "prepkit"
    assert sum(isinstance(planned.step, CreateGradScaler) for planned in made.steps) == 1


def scaled(rank: int, world: int) -> tuple[float, list[str]]:
    """The largest gradient of a loss so small that float16 rounds its gradients to 0, and what verification says."""
    del rank, world
    model, batch = toy()
    cfg = Config(
        engine=pk.TensorParallel(),
        tp_plan=PLAIN_ROWS,
        precision=FP16(),
        optimizer=pk.optim.SGD(lr=0.0),
        overrides=ON_CPU,
    )
    ready = pk.apply(pk.build_plan(cfg, model))
    ready.backward(ready.model(**batch).loss * 1e-7)
    grads = [whole(param.grad) for param in ready.model.parameters() if param.grad is not None]
    return max(float(grad.abs().max()) for grad in grads), [str(check) for check in ready.attestation.failed]


def test_small_gradients_of_tensor_parallel_float16_do_not_vanish(gang2: Gang) -> None:
    for largest, failed in gang2.run(scaled, timeout=60):
        assert largest > 0
        assert failed == []


def test_copies_of_an_optimizer_that_keeps_each_parameter_apart_are_looked_at() -> None:
    plan: Any = SimpleNamespace(owners=SimpleNamespace(master_weights="DeepSpeed's float32 copies"))
    kept = [[torch.zeros(1)], [torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)]]  # FP16_UnfusedOptimizer's
    engine = SimpleNamespace(optimizer=SimpleNamespace(fp32_groups=kept))
    assert list(copies(plan, engine)) == ["a group of them is torch.bfloat16"]
