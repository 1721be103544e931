"""Attributes, hooks, strides and rows that a forward writes: moved, laid in order, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations

import prepkit as pk
from prepkit.applying.handlers.swap_layers import carry_over
from prepkit.applying.handlers.sync_batch_norm import CONVERT
from prepkit.findings import PlanRejected
from prepkit.objects.target import Target
from prepkit.observe import observe
from prepkit.plan.drift import drift
from prepkit.steps import ConvertSyncBatchNorm
from tests.support.gang import Gang

WIDTH = 4


class Two(nn.Module):
    """Two layers, of which one holds a transposed weight, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8, bias=False)
        self.last.weight = nn.Parameter(torch.randn(WIDTH, 8).t())

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.last(self.first(self.embed(tokens)))
        return logits


def seeded() -> Two:
    torch.manual_seed(0)
    model = Two()
    model.first.weight._no_weight_decay = True  # type: ignore[attr-defined]  # as timm and others do
    model.first.bias._optim = {"lr": 0.1}  # type: ignore[attr-defined]
    return model


TP = pk.tp.TPPlan((pk.tp.TPLayer("first", "colwise", output_layout="replicate"),))
ENGINES: dict[str, pk.Config] = {
    "FSDP2": pk.Config(engine=pk.FSDP2(wrap=pk.wrap.WrapClasses(("Linear",)))),
    "TensorParallel": pk.Config(engine=pk.TensorParallel(), tp_plan=TP),
    "FSDP1": pk.Config(engine=pk.FSDP1()),
    "ZeRO 2": pk.Config(engine=pk.DeepSpeed(stage=2, micro_batch=2)),
    "ZeRO 3": pk.Config(engine=pk.DeepSpeed(stage=3, micro_batch=2)),
}


def batch(reader: int) -> Tensor:
    return torch.randint(8, (2, 3), generator=torch.Generator().manual_seed(reader))


def trained(rank: int, world: int, engine: str) -> tuple[list[float], list[float], list[Any], list[str]]:
    """Losses here and in one process, the attributes afterwards, and the failed checks."""
    cfg = evolve(ENGINES[engine], optimizer=pk.optim.SGD(lr=0.1))
    if engine.startswith("ZeRO"):
        from tests.support.deepspeed_cpu import lean

        lean()
    parts = engine != "TensorParallel"
    ready = pk.apply(pk.build_plan(cfg, seeded()))
    params = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in ready.unwrap().named_parameters()}
    held = [getattr(params["first.weight"], "_no_weight_decay", None), getattr(params["first.bias"], "_optim", None)]
    alone = seeded()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    mine, expected = [], []
    for _ in range(3):
        loss = ready.model(batch(rank * parts)).square().mean()
        mine.append(loss.item())
        ready.backward(loss)
        ready.step()
        for reader in range(world if parts else 1):
            loss = alone(batch(reader)).square().mean()
            expected += [loss.item()] * (reader == rank * parts)
            (loss / (world if parts else 1)).backward()  # type: ignore[no-untyped-call]  # torch has no types
        optimizer.step()
        optimizer.zero_grad()
    failed = [str(check) for check in ready.attestation.failed]
    ready.close()
    return mine, expected, held, failed


@pytest.mark.parametrize("engine", ENGINES)
def test_a_transposed_weight_trains_as_in_one_process_and_attributes_of_parameters_stay(
    gang2: Gang, engine: str
) -> None:
    for mine, expected, held, failed in gang2.run(trained, engine, timeout=90):
        assert mine == pytest.approx(expected, abs=1e-5)
        assert held == [True, {"lr": 0.1}]
        assert failed == []


def test_what_hangs_on_parameters_is_a_fact() -> None:
    model = seeded()
    model.first.weight.register_hook(lambda grad: grad)  # type: ignore[no-untyped-call]  # torch has no types
    model.first.bias.register_post_accumulate_grad_hook(lambda param: None)
    model.embed.max_norm = 1.0
    facts = observe(model).facts
    assert facts.model.param_attributes == (("first.weight", "_no_weight_decay"), ("first.bias", "_optim"))
    assert facts.model.param_hooks == (
        ("first.weight", "register_hook"),
        ("first.bias", "register_post_accumulate_grad_hook"),
    )
    assert facts.model.strided == ("last.weight",)
    assert facts.model.self_written == (("embed.weight", "max_norm=1"),)
    plain = observe(seeded()).facts
    assert {one.where for one in drift(plain, facts)} == {"model.param_hooks", "model.self_written"}
    quiet = observe(parametrizations.weight_norm(nn.Linear(2, 2))).facts.model
    assert (quiet.param_attributes, quiet.param_hooks, quiet.strided, quiet.self_written) == ((), (), (), ())


def found(engine: Any, model: nn.Module, world: int = 2) -> set[str]:
    cfg = pk.Config(engine=engine, optimizer=pk.optim.SGD(), tp_plan=TP)
    every = pk.check(cfg, model, env=pk.Env.declare(world_size=world, torch="2.13"))
    return {one.rule for one in every if one.rule.startswith("params.")}


def test_hooks_and_rows_that_would_be_lost_are_refused_and_what_sees_its_own_rank_is_said() -> None:
    hooked = seeded()
    hooked.first.weight.register_hook(lambda grad: grad)  # type: ignore[no-untyped-call]  # torch has no types
    for engine in (pk.FSDP2(), pk.FSDP1(), pk.TensorParallel()):
        assert found(engine, hooked) == {"params.hooks-lost"}
    for engine in (pk.DDP(), pk.FSDP2(ignored=("first",)), pk.DeepSpeed(stage=2, micro_batch=2)):
        assert found(engine, hooked) == {"params.hooks-local"}
    assert found(pk.Single(), hooked, 1) == set()
    assert found(pk.FSDP1(use_orig_params=False), seeded()) == {"params.attributes-lost"}
    bounded = seeded()
    bounded.embed.max_norm = 1.0
    for engine in (pk.FSDP2(), pk.DDP(), pk.DeepSpeed(stage=3, micro_batch=2)):
        assert found(engine, bounded) == {"params.self-written"}
    assert found(pk.Single(), bounded, 1) == set()
    with pytest.raises(PlanRejected, match=r"`model\.embed\.max_norm = None`.*torch\.renorm\(rows, 2, 0, 1\)"):
        pk.build_plan(pk.Config(engine=pk.FSDP2(), optimizer=pk.optim.SGD()), bounded, env=pk.Env.declare(world_size=2))


def after_apply(rank: int, world: int) -> tuple[list[str], list[bool]]:
    """What the hook sees that the finding says to put on the parameters of the prepared model."""
    del world
    ready = pk.apply(pk.build_plan(evolve(ENGINES["FSDP2"], optimizer=pk.optim.SGD(lr=0.1)), seeded()))
    seen: list[Any] = []
    for param in ready.model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad))
    ready.backward(ready.model(batch(rank)).square().mean())
    whole = [grad.full_tensor() for grad in seen]
    ready.close()
    alone = seeded()
    for reader in range(2):
        (alone(batch(reader)).square().mean() / 2).backward()
    grads = [param.grad for param in alone.parameters()]
    return [type(grad).__name__ for grad in seen], [
        any(grad is not None and mine.shape == grad.shape and torch.allclose(mine, grad, atol=1e-6) for grad in grads)
        for mine in whole
    ]


def test_a_post_accumulate_hook_that_is_put_on_after_apply_sees_the_average(gang2: Gang) -> None:
    for kinds, right in gang2.run(after_apply):
        assert kinds == ["DTensor"] * 4
        assert right == [True] * 4


def test_a_batch_norm_that_is_synchronised_keeps_its_hooks_and_attributes() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    seen: list[str] = []
    handle = model[1].register_forward_hook(lambda *_: seen.append("hook"))
    model[1].mine = 7
    old = model[1]
    target = Target(model=model)
    memo = CONVERT.do(ConvertSyncBatchNorm(paths=("1",)), target)
    new: Any = target.model.get_submodule("1")
    new.eval()(torch.ones(2, 2))
    assert (type(new).__name__, new.mine, seen) == ("SyncBatchNorm", 7, ["hook"])
    handle.remove()
    new(torch.ones(2, 2))
    assert seen == ["hook"]
    assert CONVERT.undo is not None
    CONVERT.undo(ConvertSyncBatchNorm(paths=("1",)), target, memo)
    assert target.model.get_submodule("1") is old
    fresh = nn.Linear(2, 2)
    carry_over(nn.Linear(2, 2, bias=False), fresh)
    assert fresh.bias is not None
    assert not isinstance(fresh.weight, DTensor)
