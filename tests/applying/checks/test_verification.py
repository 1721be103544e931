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
from prepkit.rules import due
from prepkit.rules.rule import Moment
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
    return [f"{one.rule.removeprefix('run.')} at {one.where}: {one.what}" for one in verify(plan, target).failed]


# --- what was applied is attested ----------------------------------------------------------------------------------


def test_a_model_on_one_device_is_attested() -> None:
    plan, target = attested(SINGLE)
    attestation = verify(plan, target)
    assert str(attestation) == f"{len(attestation.asked)} rules hold"
    assert [one.rule for one in attestation.asked] == [rule.id for rule in due(Moment.APPLY)]


def test_a_sharded_model_is_attested(eight: None) -> None:
    attested(SHARDED, world=8)


def attest_for_real(rank: int, world: int, engine: DDP | FSDP2) -> list[str]:
    model = Tiny(torch.bfloat16)
    optimizer = stepped(model)
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2)
    cfg = evolve(SINGLE, engine=engine, compile=CompileModel(backend="eager"))
    made = planned(cfg, model, optimizer, world=world, loaders=(loader,))
    target = applied(made, model, optimizer, loaders=[loader])
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
        "orphans at optimizer: It no longer steps `embed.weight`, and steps 1 tensor that the model does not have.",
        "step-undone at CreateOptimizer: every slot holds the model's parameter: embed.weight",
    ]
    target.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert told(plan, target)[0] == "step-undone at CreateOptimizer: class: planned AdamW, found SGD"


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
        (narrow, "other-layout at model.embed.weight: dtype planned float32, found bfloat16"),
        (freeze, "other-layout at model.embed.weight: requires_grad planned True, found False"),
        (untie, "tie-broken at model.embed.weight: `embed.weight` and `head.weight` are no longer one parameter"),
        (add, "other-layout at model.extra: the plan has no such parameter"),
        (drop, "other-layout at model.layers.0.inner.bias: the model has no such parameter"),
        (forget, "left-on-meta at model.passing: No data for 1 tensor: `passing`"),
        (uncompile, "step-undone at CompileModules: compiled code is bound: layers.1"),
        (uncheckpoint, "step-undone at CheckpointModules: wrapped: layers.2"),
        (unmark, "step-undone at AutocastForward: autocast forward: Tiny has its own forward"),
        (swap_slots, "orphans at optimizer.param_groups[1]: It steps all that it did, in other slots"),
        (drop_slot, "orphans at optimizer.param_groups[1]: It no longer steps `layers.2."),
        (lose_optimizer, "orphans at optimizer.param_groups[0]: It no longer steps `embed.weight`"),
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
    assert told(plan, target) == ["step-undone at ShardUnits: units: layers.2 is none; layers.0.inner was not planned"]


def test_a_parameter_that_is_sharded_over_another_axis_is_named_with_both_layouts(eight: None) -> None:
    plain = Tiny()
    plan = planned(Config(engine=FSDP2(), mesh=Mesh(replicate=2, shard=4)), plain, world=8)
    target = applied(plan, plain)
    target.model = shard_anew(target, ("shard",), "layers.0", "layers.1", "layers.2", "")
    assert told(plan, target)[0] == (
        "other-layout at model.embed.weight: placements planned ('replicate', 'shard(0)'), found ('shard(0)',); "
        "likewise `layers.0.scale`, `layers.0.inner.weight`, `layers.0.inner.bias` and 12 more"
    )
    target.model = Tiny()
    assert told(plan, target)[0] == (
        "other-layout at model.embed.weight: cls planned DTensor, found Parameter; "
        "placements planned ('replicate', 'shard(0)'), found (); local_shape planned (2, 6), found (11, 6)"
    )


def test_another_mesh_is_named(eight: None) -> None:
    plan, target = attested(SHARDED, world=8)
    wrong = evolve(plan, mesh=(Axis(name="replicate", size=4), Axis(name="shard", size=2)))
    assert any("local_shape planned" in text for text in told(wrong, target))
    target.mesh = None
    assert told(plan, target) == [
        "step-undone at BuildMesh: device and axes: planned ('cpu', (('replicate', 2), ('shard', 4))), found None"
    ]


def test_state_that_did_not_follow_its_parameter_is_named(eight: None) -> None:
    plan, target = attested(SHARDED, world=8)
    assert target.optimizer is not None
    weight = target.model.get_parameter("embed.weight")
    target.optimizer.state[weight]["exp_avg"] = torch.zeros(11, 6)
    placements = "exp_avg of embed.weight has placements planned ('replicate', 'shard(0)'), found ()"
    here = "exp_avg of embed.weight has local_shape planned (2, 6), found (11, 6)"
    assert told(plan, target) == [
        f"step-undone at RebindOptimizer: state lies as its parameter does: {placements}; {here}"
    ]
    target.released["layers.0.inner.bias"] = {}
    assert "step-undone at RebindOptimizer: no state is left behind: layers.0.inner.bias" in told(plan, target)


def test_a_lost_ddp_wrapper_and_a_stopped_group_are_named() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    try:
        model = Tiny()
        plan = planned(Config(engine=DDP()), model, world=8)
        target = applied(plan, model)
        assert told(plan, target) == []
        target.model = model
        assert told(plan, target) == ["step-undone at WrapDDP: wrapped: the model is a Tiny"]
    finally:
        dist.destroy_process_group()
    assert told(plan, target)[0] == "step-undone at StartProcessGroup: default group: planned running, found none"


def test_meta_is_allowed_where_nothing_has_data() -> None:
    model = Tiny().to_empty(device="meta")
    model.head.weight = model.embed.weight
    plan = planned(Config(), model)
    target = Target(model=model)
    without = evolve(plan, steps=())
    assert verify(without, target, rehearsed=True).failed == ()
    assert told(without, target)[0].startswith("left-on-meta at model.embed.weight: No data for ")


def test_a_parameter_costs_microseconds() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(2000)))
    plan = planned(Config(), model)
    target = applied(plan, model)
    began = time.process_time()
    assert verify(plan, target).failed == ()
    assert time.process_time() - began < 4000 * 1e-3
