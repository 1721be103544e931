"""What goes wrong elsewhere when parameters are matched by address, and configs remember a model."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import prepkit as pk
from tests.support.deepspeed_cpu import lean
from tests.support.fragile_model import applied, planned
from tests.support.gang import Gang
from tests.support.transformers_models import build


class Odd(nn.Module):
    """Parameters that share an address: two without elements, and two that are halves of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.empty(0, 3), requires_grad=False) for _ in range(2))
        base = torch.arange(24.0).view(8, 3)
        self.whole, self.head = nn.Parameter(base), nn.Parameter(base[:4])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.whole.T @ torch.cat((self.head, self.head)) + self.first.sum() + self.second.sum()


def slots_of(rank: int, world: int) -> tuple[list[str], bool]:
    """Names of what the optimizer holds after preparing, and whether each has the shard of its own values."""
    del rank, world
    model = Odd()
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ready: Any = pk.apply(pk.build_plan(pk.Config(engine=pk.FSDP2()), model, optimizer=optimizer))
    names = {id(param): name for name, param in ready.model.named_parameters()}
    held = [names[id(param)] for param in ready.optimizer.param_groups[0]["params"]]
    own = all(torch.equal(param.full_tensor(), expected[name]) for name, param in ready.model.named_parameters())
    ready.backward(ready.model(torch.ones(2, 3)).sum())
    ready.step()
    return held, own


def test_parameters_that_share_an_address_stay_apart(gang2: Gang) -> None:
    for held, own in gang2.run(slots_of, timeout=60):
        assert held == ["first", "second", "whole", "head"]
        assert own


class Table(nn.Module):
    """A frozen table of integers beside what is trained."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Parameter((torch.arange(10) % 2).to(dtype), requires_grad=False)
        self.inner = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.table.float())


INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)


def table_of(rank: int, world: int, dtype: torch.dtype) -> bool:
    """Whether the sharded model computes and learns what the whole one does, and keeps the table."""
    del rank, world
    torch.manual_seed(0)
    whole = Table(dtype)
    model = Table(dtype)
    model.load_state_dict(whole.state_dict())
    ready: Any = pk.apply(pk.build_plan(pk.Config(engine=pk.FSDP2(), optimizer=pk.optim.SGD(lr=0.1)), model))
    loss, expected = (one(torch.ones(2, 10)).square().sum() for one in (ready.model, whole))
    ready.backward(loss)
    ready.step()
    expected.backward()
    torch.optim.SGD([whole.inner.weight, whole.inner.bias], lr=0.1).step()
    same = torch.allclose(ready.model.inner.weight.full_tensor(), whole.inner.weight)
    return same and torch.equal(ready.model.table.full_tensor(), whole.table) and torch.equal(loss, expected)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_frozen_integers_are_sharded_and_stay(gang2: Gang, dtype: torch.dtype) -> None:
    assert gang2.run(table_of, dtype, timeout=60) == [True, True]


@pytest.mark.parametrize("how", [None, pk.BroadcastWeights(), pk.InitWeights()], ids=repr)
def test_no_parameter_is_ignored_wherever_the_values_come_from(how: Any) -> None:
    """Elsewhere the set of ignored ones is taken before they are replaced on the way to meta (G-10)."""
    model = build("llama")[0]
    plan = planned(pk.Config(engine=pk.FSDP2(), weights=how, intent=pk.Intent.INFERENCE), model, world=4)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        target = applied(plan, model)
        units = [module for module in target.model.modules() if isinstance(module, FSDPModule)]
        groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
    finally:
        dist.destroy_process_group()
    sharded = [id(one.sharded_param) for group in groups if group is not None for one in group.fsdp_params]
    held = list(target.model.parameters())
    assert sorted(sharded) == sorted(map(id, held))
    assert all(isinstance(param, DTensor) and not param.to_local().is_meta for param in held)
    # For inference too everything is where it is computed with (G-66); what that is on a GPU is in tests.tools.gpu.
    assert {param.to_local().device.type for param in held} == {"cpu"} == {b.device.type for b in model.buffers()}


def test_one_config_prepares_two_models_of_other_classes() -> None:
    cfg = pk.Config(engine=pk.FSDP2())
    env = pk.Env.declare(world_size=2)
    units = {}
    for family in ("gpt2", "llama", "gpt2"):
        plan = pk.build_plan(cfg, build(family)[0], env=env)
        (units[family],) = (
            {unit.path for unit in one.step.units} for one in plan.steps if type(one.step).__name__ == "ShardUnits"
        )
    assert units["gpt2"] == {"transformer.h.0", "transformer.h.1", ""}
    assert units["llama"] == {"model.layers.0", "model.layers.1", "model.layers.2", ""}


def changed(rank: int, world: int, engine: Any) -> list[str]:
    """Names of the variables of the process that applying a plan has set, changed or removed."""
    del rank, world
    if isinstance(engine, pk.DeepSpeed):
        lean()
    model = nn.Linear(4, 4)
    before = dict(os.environ)
    pk.apply(pk.build_plan(pk.Config(engine=engine, optimizer=pk.optim.SGD(lr=0.1)), model))
    return sorted({name for name, _ in before.items() ^ os.environ.items()})


@pytest.mark.parametrize("engine", [pk.DDP(), pk.FSDP1(), pk.FSDP2()], ids=lambda e: type(e).__name__)
def test_a_config_writes_no_environment_variable(gang2: Gang, engine: Any) -> None:
    assert gang2.run(changed, engine) == [[], []]


def test_deepspeed_finds_the_rank_that_it_reads_and_nothing_else_in_the_environment(gang2: Gang) -> None:
    pytest.importorskip("deepspeed", reason="the extra prepkit[deepspeed] is not installed")
    for names in gang2.run(changed, pk.DeepSpeed(stage=2, micro_batch=1), timeout=120):
        assert set(names) <= {"LOCAL_RANK"}, "set where no launcher has"
