"""A parameter that another module's forward uses is named before anything is sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prepkit as pk
from prepkit.testing import tiny_facts


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


class Parent(nn.Module):
    """Its own forward uses a child's weight, before or after it has called the child, or not at all."""

    def __init__(self, *uses: str) -> None:
        super().__init__()
        self.child, self.other = Child(), Child()
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        if "before" in self.uses:
            x = nn.functional.linear(x, self.child.inner.weight)
        x = self.other(self.child(x))
        if "after" in self.uses:
            x = nn.functional.linear(x, self.child.inner.weight)
        return x


CLUSTER = pk.Env.declare(world_size=2, device="cuda", torch="2.13", bf16=True)
CHILDREN = pk.wrap.WrapClasses(("Child",))


def uses(engine: Any, model: nn.Module, **options: Any) -> list[tuple[str, str]]:
    cfg = pk.Config(engine=engine, optimizer=pk.optim.SGD(), **options)
    plan = pk.build_plan(cfg, model, env=CLUSTER)
    return [(found.rule, found.where) for found in pk.foreign_uses(plan, model, pk.ExampleInputs(torch.ones(2, 4)))]


NAMED = [("forward.used-elsewhere", "model.child.inner.weight")]


@pytest.mark.parametrize("engine", [pk.FSDP2(wrap=CHILDREN), pk.FSDP1(wrap=CHILDREN)], ids=["fsdp2", "fsdp1"])
def test_a_childs_weight_in_its_parents_forward_is_a_finding(engine: Any) -> None:
    assert uses(engine, Parent("before")) == NAMED
    assert uses(engine, Parent("after"), checkpointing=pk.CheckpointBlocks(blocks=CHILDREN)) == NAMED
    assert uses(engine, Parent(), checkpointing=pk.CheckpointBlocks(blocks=CHILDREN)) == []
    with torch.device("meta"):
        assert uses(engine, Parent("before")) == NAMED


def test_what_stays_gathered_may_be_used_after_the_units_own_forward() -> None:
    kept = pk.FSDP2(wrap=CHILDREN, reshard_after_forward=False)
    assert uses(kept, Parent("after")) == []
    assert uses(kept, Parent("before", "after")) == NAMED
    assert uses(pk.FSDP1(wrap=CHILDREN, sharding="SHARD_GRAD_OP"), Parent("after")) == []


def test_engines_without_units_and_the_root_alone_have_none() -> None:
    assert uses(pk.DDP(), Parent("before")) == []
    assert uses(pk.FSDP2(wrap=pk.wrap.WrapRoot()), Parent("before")) == []


def test_the_finding_names_module_and_parameter() -> None:
    model = Parent("before")
    plan = pk.build_plan(pk.Config(engine=pk.FSDP2(wrap=CHILDREN), optimizer=pk.optim.SGD()), model, env=CLUSTER)
    (finding,) = pk.foreign_uses(plan, model, pk.ExampleInputs(torch.ones(2, 4)))
    assert finding.what.startswith("The forward of the root computes with `child.inner.weight`")
    assert "the unit `child` alone" in finding.what
    assert "Leave `child` out" in finding.fix


def test_a_plan_that_is_given_an_example_asks_the_forward_itself() -> None:
    model, batch = Parent("before"), torch.ones(2, 4)
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    cfg = pk.Config(engine=pk.FSDP2(wrap=CHILDREN), optimizer=pk.optim.SGD())
    for example in (pk.ExampleInputs(batch), pk.ExampleInputs(x=batch)):
        with pytest.raises(pk.PlanRejected) as refused:
            pk.build_plan(cfg, model, env=CLUSTER, example=example)
        assert [found.where for found in refused.value.findings if found.rule == NAMED[0][0]] == [NAMED[0][1]]
    accepted = pk.Config(engine=cfg.engine, optimizer=cfg.optimizer, overrides=("forward.used-elsewhere",))
    plan = pk.build_plan(accepted, model, env=CLUSTER, example=pk.ExampleInputs(batch))
    assert [(found.rule, found.where) for found in plan.overridden] == NAMED
    assert pk.build_plan(cfg, Parent(), env=CLUSTER, example=pk.ExampleInputs(batch)) == pk.build_plan(
        cfg, Parent(), env=CLUSTER
    )
    assert all(torch.equal(param, weights[name]) for name, param in model.named_parameters())


def test_an_example_that_is_none_is_told_what_to_write() -> None:
    cfg = pk.Config(engine=pk.FSDP2(wrap=CHILDREN), optimizer=pk.optim.SGD())
    batch: Any = torch.ones(2, 4)
    plan = pk.build_plan(cfg, Parent(), env=CLUSTER)
    for ask in (
        lambda: pk.build_plan(cfg, Parent(), env=CLUSTER, example=batch),
        lambda: pk.foreign_uses(plan, Parent(), batch),
        lambda: pk.activations(plan, Parent(), batch),
    ):
        with pytest.raises(TypeError, match=r"example is Tensor; write pk\.ExampleInputs\(batch\)"):
            ask()
    with pytest.raises(TypeError, match="facts have no forward"):
        pk.build_plan(pk.Config(engine=pk.FSDP2()), tiny_facts(world=4), example=pk.ExampleInputs())


class Rotary(nn.Module):
    """As a Llama does it: float32 tables of the root go into each block, where they meet what the weights have made."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([RotaryBlock(), RotaryBlock()])
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.table)
        return x


class RotaryBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        turned, value = self.up(x) * table, self.up(x)
        return nn.functional.scaled_dot_product_attention(turned, turned, value)


@pytest.mark.parametrize(
    ("engine", "fails"),
    [
        (pk.FSDP2(wrap=pk.wrap.WrapClasses(("RotaryBlock",))), False),
        (pk.FSDP1(wrap=pk.wrap.WrapClasses(("RotaryBlock",)), buffer_dtype="bfloat16"), False),
        (pk.DDP(), False),
        (pk.DeepSpeed(stage=2, micro_batch=2), True),
        (pk.DeepSpeed(stage=2, micro_batch=2, config='{"data_types": {"buffer_dtype": "bf16"}}'), False),
    ],
    ids=["fsdp2", "fsdp1", "ddp", "zero", "zero with buffers cast"],
)
def test_an_example_is_computed_in_the_dtypes_in_which_the_units_compute(engine: Any, fails: bool) -> None:
    cfg = pk.Config(engine=engine, optimizer=pk.optim.SGD(), precision=pk.BF16())
    example = pk.ExampleInputs(
        torch.ones(1, 1, 2, 4, dtype=torch.bfloat16 if isinstance(engine, pk.DeepSpeed) else torch.float32)
    )
    if not fails:
        plan = pk.build_plan(cfg, Rotary(), env=CLUSTER, example=example)
        assert pk.activations(plan, Rotary(), example) > 0
        return
    with pytest.raises(
        RuntimeError, match="the forward of Rotary fails on what it is given, with parameters in"
    ) as told:
        pk.build_plan(cfg, Rotary(), env=CLUSTER, example=example)
    assert ('write "data_types": {"buffer_dtype": "bf16"}' in str(told.value)) is isinstance(engine, pk.DeepSpeed)
