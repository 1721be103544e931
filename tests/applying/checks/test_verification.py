"""What stands there after apply is compared with the plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import Parameter
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, TensorDataset

from prepkit.applying.verification import verify
from prepkit.config import BF16, DDP, FSDP2, AdamW, CheckpointBlocks, CompileBlocks, CompileModel, Config, Mesh
from prepkit.objects.forward import MARK
from prepkit.objects.target import Target
from prepkit.plan import Plan
from prepkit.steps import Axis
from tests.support.fragile_model import Tiny, applied, planned, stepped
from tests.support.gang import Gang

SINGLE = Config(precision=BF16(), compile=CompileBlocks(backend="eager"), checkpointing=CheckpointBlocks())
SHARDED = evolve(SINGLE, engine=FSDP2(), mesh=Mesh(replicate=2, shard=4))


@pytest.fixture
def eight() -> Iterator[None]:
    """A fake group, in which this process is rank 3 of 8."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    yield
    dist.destroy_process_group()


def attested(cfg: Config, world: int = 1) -> tuple[Plan, Target]:
    """A bfloat16 model with an optimizer that has stepped, prepared; and its plan."""
    model = Tiny(torch.bfloat16)
    optimizer = stepped(model)
    plan = planned(cfg, model, optimizer, world=world)
    target = applied(plan, model, optimizer)
    assert verify(plan, target).failed == ()
    return plan, target


def told(plan: Plan, target: Target) -> list[str]:
    return [str(check) for check in verify(plan, target).failed]


# --- what was applied is attested ----------------------------------------------------------------------------------


def test_a_model_on_one_device_is_attested() -> None:
    plan, target = attested(SINGLE)
    attestation = verify(plan, target)
    assert str(attestation) == f"{len(attestation.checks)} checks hold"
    assert len(attestation.checks) >= len(plan.layout) + len(plan.steps)


def test_a_sharded_model_is_attested(eight: None) -> None:
    attested(SHARDED, world=8)


def attest_for_real(rank: int, world: int, engine: DDP | FSDP2) -> list[str]:
    model = Tiny(torch.bfloat16)
    optimizer = stepped(model)
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2)
    cfg = evolve(SINGLE, engine=engine, compile=CompileModel(backend="eager"))
    made = planned(cfg, model, optimizer, world=world, loaders=(loader,))
    target = applied(made, model, optimizer, loaders=[loader])
    assert any(check.subject == "ShardLoader" for check in verify(made, target).checks)
    return told(made, target)


@pytest.mark.parametrize("engine", [DDP(), FSDP2()])
def test_both_ranks_of_a_real_group_are_attested(gang2: Gang, engine: DDP | FSDP2) -> None:
    assert gang2.run(attest_for_real, engine) == [[], []]


def test_a_created_optimizer_is_attested_and_its_loss_is_not() -> None:
    model = Tiny()
    plan = planned(Config(optimizer=AdamW()), model)
    target = applied(plan, model)
    assert told(plan, target) == []
    assert target.optimizer is not None
    target.optimizer.param_groups[0]["params"][0] = Parameter(torch.empty(11, 6))
    assert told(plan, target) == [
        "optimizer: tensors that are not the model's: planned 0, found 1",
        "optimizer: every parameter that is trained is stepped: embed.weight is not held",
        "CreateOptimizer: every slot holds the model's parameter: embed.weight",
    ]
    target.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert told(plan, target)[0] == "CreateOptimizer: class: planned AdamW, found SGD"


# --- what is not as planned is named -------------------------------------------------------------------------------


def narrow(target: Target) -> None:
    weight = target.model.get_parameter("embed.weight")
    weight.data = weight.data.bfloat16()


def freeze(target: Target) -> None:
    target.model.get_parameter("embed.weight").requires_grad = False


def untie(target: Target) -> None:
    model: Any = target.model
    model.head.weight = Parameter(model.embed.weight.detach().clone())


def add(target: Target) -> None:
    target.model.register_parameter("extra", Parameter(torch.ones(1)))


def drop(target: Target) -> None:
    model: Any = target.model
    model.layers[0]._checkpoint_wrapped_module.inner.bias = None


def forget(target: Target) -> None:
    model: Any = target.model
    model.passing = model.passing.to("meta")


def uncompile(target: Target) -> None:
    model: Any = target.model
    model.layers[1]._compiled_call_impl = None


def uncheckpoint(target: Target) -> None:
    model: Any = target.model
    inner = model.layers[2]._checkpoint_wrapped_module
    inner.compile(backend="eager")
    model.layers[2] = inner


def unmark(target: Target) -> None:
    delattr(target.model, MARK)


def swap_slots(target: Target) -> None:
    assert target.optimizer is not None
    held = target.optimizer.param_groups[1]["params"]
    held[0], held[1] = held[1], held[0]


def drop_slot(target: Target) -> None:
    assert target.optimizer is not None
    target.optimizer.param_groups[1]["params"].pop()


def lose_optimizer(target: Target) -> None:
    target.optimizer = None


@pytest.mark.parametrize(
    ("vandal", "text"),
    [
        (narrow, "embed.weight: layout: dtype planned float32, found bfloat16"),
        (freeze, "embed.weight: layout: requires_grad planned True, found False"),
        (untie, "embed.weight: tied: embed.weight and head.weight are no longer one parameter"),
        (add, "model: no parameter that the plan does not know: extra"),
        (drop, "layers.0.inner.bias: exists: the model has no such parameter"),
        (forget, "model: nothing is left on meta: passing"),
        (uncompile, "CompileModules: compiled code is bound: layers.1"),
        (uncheckpoint, "CheckpointModules: wrapped: layers.2"),
        (unmark, "AutocastForward: autocast forward: Tiny has its own forward"),
        (swap_slots, "optimizer: every slot holds the model's parameter: group 1 slot 0 does not hold the model's "),
        (drop_slot, "optimizer: slots per group: planned [3, 10], found [3, 9]"),
        (lose_optimizer, "optimizer: exists: the plan has one, the target has none"),
    ],
)
def test_what_differs_is_the_first_thing_told(vandal: Callable[[Target], None], text: str) -> None:
    plan, target = attested(SINGLE)
    vandal(target)
    assert told(plan, target)[0].startswith(text)


def shard_anew(target: Target, mesh_names: tuple[str, ...], *units: str) -> Tiny:
    """A fresh model with only these units."""
    model = Tiny()
    assert target.mesh is not None
    for path in units:
        fully_shard(model.get_submodule(path), mesh=target.mesh[mesh_names], reshard_after_forward=path != "")
    return model


def test_a_missing_and_an_unplanned_unit_are_named(eight: None) -> None:
    cfg = Config(engine=FSDP2(), mesh=Mesh(replicate=2, shard=4))
    plain = Tiny()
    plan = planned(cfg, plain, world=8)
    target = applied(plan, plain)
    assert told(plan, target) == []
    axes = ("replicate", "shard")
    target.model = shard_anew(target, axes, "layers.0.inner", "layers.0", "layers.1", "")
    assert told(plan, target) == ["ShardUnits: units: layers.2 is none; layers.0.inner was not planned"]


def test_a_parameter_that_is_sharded_over_another_axis_is_named_with_both_layouts(eight: None) -> None:
    plain = Tiny()
    plan = planned(Config(engine=FSDP2(), mesh=Mesh(replicate=2, shard=4)), plain, world=8)
    target = applied(plan, plain)
    target.model = shard_anew(target, ("shard",), "layers.0", "layers.1", "layers.2", "")
    assert told(plan, target)[0] == (
        "embed.weight: layout: placements planned ('replicate', 'shard(0)'), found ('shard(0)',)"
    )
    target.model = Tiny()
    assert told(plan, target)[0] == (
        "embed.weight: layout: cls planned DTensor, found Parameter; "
        "placements planned ('replicate', 'shard(0)'), found (); local_shape planned (2, 6), found (11, 6)"
    )


def test_another_mesh_is_named(eight: None) -> None:
    plan, target = attested(SHARDED, world=8)
    wrong = evolve(plan, mesh=(Axis(name="replicate", size=4), Axis(name="shard", size=2)))
    assert any("local_shape planned" in text for text in told(wrong, target))
    target.mesh = None
    assert told(plan, target) == [
        "BuildMesh: device and axes: planned ('cpu', (('replicate', 2), ('shard', 4))), found None"
    ]


def test_state_that_did_not_follow_its_parameter_is_named(eight: None) -> None:
    plan, target = attested(SHARDED, world=8)
    assert target.optimizer is not None
    weight = target.model.get_parameter("embed.weight")
    target.optimizer.state[weight]["exp_avg"] = torch.zeros(11, 6)
    placements = "exp_avg of embed.weight has placements planned ('replicate', 'shard(0)'), found ()"
    local = "exp_avg of embed.weight has local_shape planned (2, 6), found (11, 6)"
    assert told(plan, target) == [f"RebindOptimizer: state lies as its parameter does: {placements}; {local}"]
    target.released["layers.0.inner.bias"] = {}
    assert "RebindOptimizer: no state is left behind: layers.0.inner.bias" in told(plan, target)


def test_a_lost_ddp_wrapper_and_a_stopped_group_are_named() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    try:
        model = Tiny()
        plan = planned(Config(engine=DDP()), model, world=8)
        target = applied(plan, model)
        assert told(plan, target) == []
        target.model = model
        assert told(plan, target) == ["WrapDDP: wrapped: the model is a Tiny"]
    finally:
        dist.destroy_process_group()
    assert told(plan, target)[0] == "StartProcessGroup: default group: planned running, found none"


def test_meta_is_allowed_where_nothing_has_data() -> None:
    model = Tiny().to_empty(device="meta")
    model.head.weight = model.embed.weight
    plan = planned(Config(), model)
    target = Target(model=model)
    without = evolve(plan, steps=())
    assert verify(without, target, allow_meta=True).failed == ()
    assert told(without, target)[0].startswith("model: nothing is left on meta: embed.weight")


def test_a_parameter_costs_microseconds() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(2000)))
    plan = planned(Config(), model)
    target = applied(plan, model)
    began = time.process_time()
    assert verify(plan, target).failed == ()
    assert time.process_time() - began < 4000 * 100e-6
