"""Several optimizers over one model, and one over two: each trains what it should, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import prepkit as pk
from prepkit.config import OptimizerSpec
from prepkit.findings import FindingWarning
from tests.support.gang import Gang

WIDTH = 8
GROUPS = (pk.optim.Group(names=("*.bias", "*norm*"), weight_decay=0.0, lr=0.02),)
SPECS = (pk.optim.Muon(lr=0.05, names=("blocks.*",)), pk.optim.AdamW(lr=0.03, weight_decay=0.5, groups=GROUPS))


NEAR = 4e-3
"""Muon computes in bfloat16; a step that is left out moves weights by 2e-2 and more."""


class Net(nn.Module):
    """Matrices for one optimizer, vectors and a head for another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: Tensor = self.head(self.norm(x))
        return out


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batches(rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    # More rows than columns: Muon turns the noise of gradients without full rank into updates.
    whole = [(torch.randn(64, WIDTH, generator=draw), torch.randn(64, 2, generator=draw)) for _ in range(3)]
    return [(x[rank::world], y[rank::world]) for x, y in whole]


def made(model: Net) -> list[torch.optim.Optimizer]:
    """What ``SPECS`` mean, by hand."""
    plain = [model.head.weight]
    special = [p for name, p in model.named_parameters() if name.endswith("bias") or "norm" in name]
    return [
        torch.optim.Muon([block.weight for block in model.blocks], lr=0.05),  # type: ignore[misc]  # a module's
        torch.optim.AdamW(
            [{"params": plain}, {"params": special, "weight_decay": 0.0, "lr": 0.02}], lr=0.03, weight_decay=0.5
        ),
    ]


def schedules(optimizers: list[torch.optim.Optimizer]) -> list[torch.optim.lr_scheduler.LRScheduler]:
    step_lr = torch.optim.lr_scheduler.StepLR
    return [step_lr(optimizers[0], 1, 0.5), step_lr(optimizers[1], 2, 0.1)]


def by_hand(scheduled: bool) -> dict[str, Tensor]:
    model = net()
    optimizers = made(model)
    ticks = schedules(optimizers) if scheduled else []
    for x, y in batches(0, 1):
        (model(x) - y).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for each in (*optimizers, *ticks):
            each.step()
        model.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def trained(
    rank: int, world: int, cfg: pk.Config, given: bool, folder: str
) -> tuple[dict[str, Tensor], list[list[str]]]:
    """Weights, and the names in the slots of each optimizer; saved, spoilt and read again after two steps."""
    model = net()
    optimizers = made(model)
    scheduler = schedules(optimizers) if given else None
    ready = pk.apply(pk.build_plan(cfg, model, optimizer=optimizers if given else SPECS, scheduler=scheduler))
    for step, (x, y) in enumerate(batches(rank, world)):
        ready.backward((ready.model(x) - y).square().mean())
        assert ready.step()
        if step == 1 and folder:
            ready.save(folder)
            for member in ready.loop.optimizers:
                for group in member.param_groups:
                    for param in group["params"]:
                        param.data.mul_(0.0)
                member.state.clear()
            ready.resume(folder)
    assert [type(each).__name__ for each in ready.loop.optimizers] == ["Muon", "AdamW"]
    inner = dict(ready.unwrap().named_parameters())
    names = {id(param): name for name, param in inner.items()}
    held = [[names[id(p)] for group in each.param_groups for p in group["params"]] for each in ready.loop.optimizers]
    weights = {name: _whole(param) for name, param in inner.items()}
    ready.close()
    return weights, held


def _whole(param: Tensor) -> Tensor:
    return (param.full_tensor() if isinstance(param, DTensor) else param).detach().clone()


ENGINES = {
    "FSDP2, given": (pk.Config(engine=pk.FSDP2(wrap=pk.wrap.WrapPaths(("blocks.*",)))), True),
    "FSDP2, asked for": (pk.Config(engine=pk.FSDP2(wrap=pk.wrap.WrapPaths(("blocks.*",)))), False),
    "DDP, given": (pk.Config(engine=pk.DDP()), True),
}


@pytest.mark.parametrize("name", ENGINES)
def test_two_optimizers_train_what_they_train_by_hand_and_a_checkpoint_holds_both(
    gang2: Gang, name: str, tmp_path: Path
) -> None:
    cfg, given = ENGINES[name]
    weights, held = gang2.run(trained, evolve(cfg, clip=pk.ClipNorm(0.5)), given, str(tmp_path / "saved"))[0]
    expected = by_hand(scheduled=given)
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, atol=NEAR, rtol=0.0, msg=lambda text, key=key: f"{key}: {text}")
    assert held[0] == ["blocks.0.weight", "blocks.1.weight"]
    assert held[1][0] == "head.weight"


def test_two_optimizers_in_one_process_step_and_clear_together_under_one_loss_scale() -> None:
    model = net()
    ready = pk.apply(pk.build_plan(pk.Config(clip=pk.ClipNorm(0.5)), model, optimizer=SPECS))
    for x, y in batches(0, 1):
        ready.backward((ready.model(x) - y).square().mean())
        assert ready.step()
        assert all(param.grad is None for param in model.parameters())
    for key, value in by_hand(scheduled=False).items():
        torch.testing.assert_close(dict(model.named_parameters())[key].detach(), value)
    state = ready.optimizer.state_dict()  # type: ignore[union-attr]  # there are two
    ready.optimizer.load_state_dict(state)  # type: ignore[union-attr]
    assert [len(each.state) for each in ready.loop.optimizers] == [2, 6]


def test_the_second_optimizer_that_the_plan_does_not_know_is_refused_before_it_steps() -> None:
    model = net()
    first, second = made(model)
    plan = pk.build_plan(pk.Config(), model, optimizer=second)
    ready = pk.apply(plan)
    x, y = batches(0, 1)[0]
    ready.backward((ready.model(x) - y).square().mean())
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match=r"this Muon holds 2 parameters of a prepared model.*blocks\.0\.weight"):
        first.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert ready.step()
    ready.close()
    first.step()  # nothing is prepared any more


def replaced(rank: int, world: int) -> str:
    """What an optimizer says that holds what ``fully_shard`` has replaced."""
    model = net()
    first, second = made(model)
    ready = pk.apply(pk.build_plan(pk.Config(engine=pk.FSDP2()), model, optimizer=second))
    try:
        first.step()
    except RuntimeError as error:
        return str(error)
    finally:
        ready.close()
    return ""


def test_an_optimizer_over_parameters_that_are_gone_says_so_at_its_first_step(gang2: Gang) -> None:
    told = gang2.run(replaced)
    assert "this Muon holds 2 parameters that apply has replaced" in told[0]
    assert "optimizer=[first, second]" in told[1]


def test_apply_says_every_warning_of_the_plan_once() -> None:
    model = net()
    plan = pk.build_plan(pk.Config(), model, optimizer=made(model)[1])
    assert [finding.rule for finding in plan.warnings] == ["optimizer.misses-parameters"]
    with pytest.warns(FindingWarning) as heard:
        pk.apply(plan).close()
    assert [str(one.message) for one in heard] == [str(plan.warnings[0])]


def test_one_optimizer_over_two_models_is_refused_when_the_second_is_prepared() -> None:
    one, two = net(), net()
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    cfg = pk.Config(overrides=("optimizer.foreign-parameters",), accumulation=2)
    first = pk.apply(pk.build_plan(cfg, one, optimizer=optimizer))
    with pytest.raises(pk.PlanRejected, match=r"optimizer\.prepared-elsewhere"):
        pk.apply(pk.build_plan(cfg, two, optimizer=optimizer))
    first.close()
    pk.apply(pk.build_plan(cfg, two, optimizer=optimizer)).close()


def test_what_is_no_optimizer_in_a_list_is_named_by_its_place() -> None:
    model = net()
    with pytest.raises(TypeError, match=r"optimizer\[1\] is the class SGD itself"):
        pk.build_plan(pk.Config(), model, optimizer=[made(model)[0], torch.optim.SGD])
    with pytest.raises(TypeError, match="specs alone, or optimizers alone"):
        pk.build_plan(pk.Config(), model, optimizer=[made(model)[0], pk.optim.AdamW()])


def test_lbfgs_steps_with_a_closure_and_says_so_without_one() -> None:
    model, plain = net(), net()
    x, y = batches(0, 1)[0]
    ready = pk.apply(pk.build_plan(pk.Config(), model, optimizer=torch.optim.LBFGS(model.parameters(), max_iter=3)))
    ready.backward((ready.model(x) - y).square().mean())
    with pytest.raises(
        RuntimeError, match=r"LBFGS asks for gradients several times a step\.\n  fix: Write ready\.step\(closure\)"
    ):
        ready.step()
    optimizer = torch.optim.LBFGS(plain.parameters(), max_iter=3)

    def closure() -> Tensor:
        loss = (ready.model(x) - y).square().mean()
        ready.backward(loss)
        return loss

    def by_hand() -> Tensor:
        optimizer.zero_grad()
        loss = (plain(x) - y).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        assert ready.step(closure)
        optimizer.step(by_hand)  # type: ignore[arg-type]  # torch wants a float
    for prepared, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(prepared, wanted)


def test_specs_are_specs_of_the_config_as_well() -> None:
    cfg = pk.Config(optimizer=SPECS)
    assert isinstance(SPECS[0], OptimizerSpec)
    assert pk.build_plan(cfg, net()).steps == pk.build_plan(pk.Config(), net(), optimizer=list(SPECS)).steps


def test_sparse_gradients_are_looked_at_before_the_first_step() -> None:
    model = nn.Embedding(8, 2, sparse=True)
    ready = pk.apply(pk.build_plan(pk.Config(), model, optimizer=torch.optim.SparseAdam(model.parameters(), lr=0.5)))
    before = model.weight.detach().clone()
    ready.backward(ready.model(torch.tensor([1, 3])).square().mean())
    assert ready.step()
    assert [bool(row.any()) for row in (model.weight - before)] == [index in (1, 3) for index in range(8)]


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer, and every second time goes half of the way back; ``finished`` as torch wants it."""

    def __init__(self, inner: torch.optim.Optimizer, *, finished: bool) -> None:
        if finished:
            super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.taken = inner, 0
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        self.slow = [param.detach().clone() for group in inner.param_groups for param in group["params"]]

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)
        self.taken += 1
        params = [param for group in self.param_groups for param in group["params"]]
        for slow, param in zip(self.slow, params, strict=True) if self.taken % 2 == 0 else ():
            slow.lerp_(param.detach(), 0.5)
            param.data.copy_(slow)


def test_a_wrapper_of_an_optimizer_trains_as_alone_and_one_without_hooks_is_refused_by_the_plan() -> None:
    def made(finished: bool) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        return model, Lookahead(torch.optim.SGD(model.parameters(), lr=0.1), finished=finished)

    model, optimizer = made(finished=False)
    with pytest.raises(pk.PlanRejected, match=r"optimizer.unfinished[\s\S]*super\(\).__init__\(params, defaults\)"):
        pk.build_plan(pk.Config(), model, optimizer=optimizer)
    rows = torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(1))
    model, optimizer = made(finished=True)
    alone, own = made(finished=True)
    ready: Any = pk.apply(pk.build_plan(pk.Config(), model, optimizer=optimizer))
    for row in rows:
        ready.backward(ready.model(row).square().mean())
        assert ready.step()
        alone(row).square().mean().backward()
        own.step()
        own.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))
    ready.close()
