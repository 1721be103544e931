"""An optimizer lets go, takes hold again by name, and loses no state on the way."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adafactor, Adagrad, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import StepLR

from prepkit.applying.handlers.optimizer import CREATE, REBIND
from prepkit.objects import fsdp1_flat, names
from prepkit.objects.target import Target
from prepkit.steps import (
    CreateOptimizer,
    OptimizerOption,
    RebindOptimizer,
    ReleaseOptimizer,
    ShardUnits,
    Unit,
    UpcastParameters,
)
from tests.support.fragile_model import TOKENS, Tiny, stepped
from tests.support.single_step import do, fake_group, problems, shard_mesh, undo

UNITS = (
    *(Unit(path=f"layers.{i}", reshard_after_forward=True) for i in range(3)),
    Unit(path="", reshard_after_forward=False),
)
SHARD = ShardUnits(units=UNITS, param_dtype=None, reduce_dtype=None, offload=False, pin_memory=False)


def slots_of(target: Target) -> tuple[tuple[str, ...], ...]:
    """What the planner would write: names by identity."""
    assert target.optimizer is not None
    held = {id(param): name for name, param in names.named_parameters(target.model).items()}
    return tuple(tuple(held.get(id(p), "") for p in group["params"]) for group in target.optimizer.param_groups)


def given(make: Callable[[Any], Optimizer] | None = None) -> tuple[Target, ReleaseOptimizer, RebindOptimizer]:
    model = Tiny()
    if make is None:
        optimizer = stepped(model)
    else:
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        model(TOKENS).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    target = Target(model=model, optimizer=optimizer)
    slots = slots_of(target)
    return target, ReleaseOptimizer(slots=slots), RebindOptimizer(slots=slots)


def optimizer_of(target: Target) -> Optimizer:
    assert target.optimizer is not None
    return target.optimizer


def rows(whole: torch.Tensor, world: int, rank: int) -> torch.Tensor:
    """What ``torch.chunk`` gives a rank; the oracle for sharding."""
    chunks = torch.chunk(whole, world)
    return chunks[rank] if rank < len(chunks) else whole[:0]


# --- release -------------------------------------------------------------------------------------------------------


def test_released_slots_hold_distinct_empty_parameters_and_no_state() -> None:
    target, release, _ = given()
    do(release, target)
    held = [p for group in optimizer_of(target).param_groups for p in group["params"]]
    assert {p.numel() for p in held} == {0}
    assert len({id(p) for p in held}) == len(held) > 10
    assert len(optimizer_of(target).state) == 0
    assert set(target.released) == {name for group in release.slots for name in group}


def test_sharding_frees_every_old_parameter_once_the_optimizer_is_released() -> None:
    with fake_group(4):
        target, release, rebind = given()
        target.mesh = shard_mesh(4)
        old = {name: weakref.ref(p) for name, p in names.named_parameters(target.model).items()}
        whole = weakref.ref(optimizer_of(target).state[target.model.embed.weight]["exp_avg"])
        do(release, target)
        do(SHARD, target)
        gc.collect()
        assert [name for name, ref in old.items() if ref() is not None] == []
        memo = do(rebind, target)
        gc.collect()
        assert whole() is None, "the memo must not keep the whole state"
        del memo


def test_an_optimizer_that_is_not_released_keeps_the_whole_model() -> None:
    """The control of the test above: it can tell."""
    with fake_group(4):
        target, _, _ = given()
        target.mesh = shard_mesh(4)
        old = weakref.ref(target.model.embed.weight)
        do(SHARD, target)
        gc.collect()
        assert old() is not None


def test_a_release_is_taken_back_with_its_state() -> None:
    target, release, _ = given()
    before = copy.deepcopy(optimizer_of(target).state_dict())
    slots = [list(group["params"]) for group in optimizer_of(target).param_groups]
    undo(release, target, do(release, target))
    after = optimizer_of(target).state_dict()
    assert [[id(p) for p in g["params"]] for g in optimizer_of(target).param_groups] == [
        [id(p) for p in g] for g in slots
    ]
    assert str(after) == str(before)
    assert target.released == {}


def test_a_foreign_tensor_in_a_slot_is_left_alone() -> None:
    model, foreign = Tiny(), nn.Parameter(torch.ones(3))
    target = Target(model=model, optimizer=SGD([model.embed.weight, foreign], lr=0.1))
    release = ReleaseOptimizer(slots=slots_of(target))
    assert release.slots == (("embed.weight", ""),)
    do(release, target)
    assert optimizer_of(target).param_groups[0]["params"][1] is foreign


def test_a_release_refuses_slots_that_changed_since() -> None:
    target, release, _ = given()
    params = optimizer_of(target).param_groups[1]["params"]
    params[0], params[1] = params[1], params[0]
    (text,) = problems(release, target)
    first, second = release.slots[1][:2]
    assert text == f"plan.model-changed at {first}, {second}: the optimizer no longer holds it where the plan says"


def test_a_release_refuses_another_number_of_slots_and_no_optimizer() -> None:
    target, release, rebind = given()
    optimizer_of(target).param_groups[0]["params"].pop()
    told = ("plan.model-changed at optimizer: has groups of [2, 10] parameters, the plan of [3, 10]",)
    assert problems(release, target) == problems(rebind, target) == told
    (text,) = problems(release, Target(model=Tiny()))
    assert text.startswith("plan.model-changed at optimizer: the plan was made with one; Give it to apply()")


def test_state_that_no_shard_can_take_is_refused_before_anything_is_released() -> None:
    target, release, _ = given(lambda params: Adafactor(params, lr=0.1))
    found = problems(release, target)
    assert found[0] == (
        "optimizer.state-layout at optimizer.state[embed.weight]['row_var']: is of shape (11, 1), neither of the "
        "parameter's shape (11, 6) nor a scalar, and cannot be sharded"
    )
    optimizer_of(target).state[target.model.embed.weight] = {"history": [torch.ones(3)]}
    assert "optimizer.state[embed.weight]['history']: is a list" in problems(release, target)[0]


# --- rebind --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 2, 3])
@pytest.mark.parametrize(
    "make",
    [
        None,
        lambda params: SGD(params, lr=0.1, momentum=0.9),
        lambda params: SGD(params, lr=0.1),
        lambda params: Adagrad(params, lr=0.1),
        lambda params: NAdam(params, lr=0.1),
    ],
    ids=["adamw", "momentum", "sgd", "adagrad", "nadam"],
)
def test_state_takes_the_shards_of_its_parameter_and_scalars_stay(make: Any, rank: int) -> None:
    with fake_group(4, rank):
        target, release, rebind = given(make)
        before = {
            name: copy.deepcopy(optimizer_of(target).state[param])
            for name, param in names.named_parameters(target.model).items()
            if param in optimizer_of(target).state
        }
        target.mesh = shard_mesh(4)
        do(release, target)
        do(SHARD, target)
        do(rebind, target)
        assert slots_of(target) == rebind.slots
        held = names.named_parameters(target.model)
        assert {name for name in held if held[name] in optimizer_of(target).state} == set(before)
        for name, state in before.items():
            now, param = optimizer_of(target).state[held[name]], held[name]
            assert set(now) == set(state)
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    assert isinstance(now[key], DTensor)
                    assert isinstance(param, DTensor)
                    assert (now[key].placements, now[key].device_mesh) == (param.placements, param.device_mesh)
                    assert (now[key].shape, now[key].stride()) == (value.shape, value.stride())
                    assert torch.equal(now[key].to_local(), rows(value, 4, rank))
                else:
                    assert now[key] == value
        assert target.released == {}


def test_a_scheduler_made_before_still_drives_the_optimizer_after() -> None:
    with fake_group(2):
        target, release, rebind = given(lambda params: SGD(params, lr=1.0))
        scheduler = StepLR(optimizer_of(target), step_size=1, gamma=0.5)
        target.mesh = shard_mesh(2)
        for step in (release, SHARD, rebind):
            do(step, target)
        optimizer_of(target).step()
        scheduler.step()
        assert optimizer_of(target).param_groups[0]["lr"] == 0.5


def test_state_follows_an_upcast_between_release_and_rebind() -> None:
    with fake_group(2):
        model = Tiny(torch.bfloat16)
        target = Target(model=model, optimizer=stepped(model), mesh=shard_mesh(2))
        slots = slots_of(target)
        trained = tuple(name for group in slots for name in group)
        do(ReleaseOptimizer(slots=slots), target)
        do(UpcastParameters(names=trained, dtype="float32"), target)
        for unit in UNITS[:3]:
            model.get_submodule(unit.path).scale.data = model.get_submodule(unit.path).scale.data.float()
        do(SHARD, target)
        do(RebindOptimizer(slots=slots), target)
        state = optimizer_of(target).state[model.embed.weight]
        assert (state["exp_avg"].dtype, model.embed.weight.dtype) == (torch.float32, torch.float32)


def test_without_a_release_every_slot_and_all_state_stay_the_same_objects() -> None:
    target, _, rebind = given()
    before = {param: dict(state) for param, state in optimizer_of(target).state.items()}
    memo = do(rebind, target)
    for param, state in optimizer_of(target).state.items():
        assert {key: id(value) for key, value in state.items()} == {k: id(v) for k, v in before[param].items()}
    undo(rebind, target, memo)
    assert slots_of(target) == rebind.slots
    assert len(optimizer_of(target).state) == len(before)


def test_a_rebind_after_sharding_is_taken_back_to_placeholders_and_sharded_state() -> None:
    with fake_group(4):
        target, release, rebind = given()
        target.mesh = shard_mesh(4)
        for step in (release, SHARD):
            do(step, target)
        undo(rebind, target, do(rebind, target))
        assert {p.numel() for g in optimizer_of(target).param_groups for p in g["params"]} == {0}
        assert all(isinstance(state["exp_avg"], DTensor) for state in target.released.values())
        undo(release, target, None)
        assert slots_of(target) == rebind.slots
        assert len(optimizer_of(target).state) == sum(map(len, rebind.slots))


def fail_on_third(monkeypatch: pytest.MonkeyPatch) -> None:
    from prepkit.applying.handlers import optimizer

    calls, real = [], optimizer.lay_out

    def lay_out(state: Any, param: Any, **how: Any) -> Any:
        calls.append(param)
        if len(calls) == 3:
            raise MemoryError
        return real(state, param, **how)

    monkeypatch.setattr(optimizer, "lay_out", lay_out)


def test_a_rebind_after_sharding_that_fails_half_way_keeps_every_state_and_no_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_group(4):
        target, release, rebind = given()
        target.mesh = shard_mesh(4)
        for step in (release, SHARD):
            do(step, target)
        fail_on_third(monkeypatch)
        with pytest.raises(MemoryError):
            do(rebind, target)
    assert {p.numel() for group in optimizer_of(target).param_groups for p in group["params"]} == {0}
    assert len(optimizer_of(target).state) == 0
    assert set(target.released) == {name for group in rebind.slots for name in group}


def test_a_rebind_that_fails_half_way_binds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    target, _, rebind = given()
    before = [[id(p) for p in group["params"]] for group in optimizer_of(target).param_groups]
    states = {id(p): id(state["exp_avg"]) for p, state in optimizer_of(target).state.items()}
    fail_on_third(monkeypatch)
    with pytest.raises(MemoryError):
        do(rebind, target)
    assert [[id(p) for p in group["params"]] for group in optimizer_of(target).param_groups] == before
    assert {id(p): id(state["exp_avg"]) for p, state in optimizer_of(target).state.items()} == states


def test_state_is_never_moved_to_a_parameter_without_data() -> None:
    model = Tiny().to("meta")
    optimizer = SGD([model.embed.weight], lr=0.1, momentum=0.9)
    optimizer.state[model.embed.weight] = {"momentum_buffer": torch.ones(11, 6)}
    (text,) = problems(RebindOptimizer(slots=(("embed.weight",),)), Target(model=model, optimizer=optimizer))
    assert text == "plan.no-weights at embed.weight: on meta, but the optimizer has state for it"


def test_counters_of_a_capturable_optimizer_go_to_the_device_and_others_stay() -> None:
    from prepkit.applying.handlers.optimizer_state import lay_out

    param = nn.Parameter(torch.empty(3, device="meta"))
    state = {"step": torch.tensor(2.0), "mu_product": torch.tensor(0.5), "exp_avg": torch.ones(3), "seen": None}
    placed = lay_out(state, param, scalars_on_device=False)
    assert placed["mu_product"].device.type == "cpu"
    assert (placed["step"].device.type, placed["exp_avg"].device.type, placed["seen"]) == ("cpu", "meta", None)
    assert lay_out(state, param, scalars_on_device=True)["step"].device.type == "meta"
    scalar = nn.Parameter(torch.tensor(1.0, device="meta"))
    placed = lay_out({"step": torch.tensor(2.0), "exp_avg": torch.tensor(1.0)}, scalar, scalars_on_device=False)
    assert (placed["step"].device.type, placed["exp_avg"].device.type) == ("cpu", "meta"), "a scalar has no counters"


@pytest.mark.parametrize(("flag", "device"), [("capturable", "meta"), ("fused", "meta"), ("foreach", "cpu")])
def test_a_rebind_takes_counters_to_the_device_where_the_group_wants_them_there(flag: str, device: str) -> None:
    model = Tiny().to("meta")
    optimizer = SGD([model.embed.weight], lr=0.1)
    optimizer.param_groups[0][flag] = True
    released = {"embed.weight": {"step": torch.tensor(2.0), "exp_avg": torch.ones(11, 6)}}
    target = Target(model=model, optimizer=optimizer, released=released)
    REBIND.do(RebindOptimizer(slots=(("embed.weight",),)), target)
    assert optimizer.state[model.embed.weight]["step"].device.type == device


def test_a_rebind_leaves_no_state_under_the_tensor_that_stood_there_and_puts_it_back() -> None:
    model = Tiny()
    old, state = nn.Parameter(torch.zeros(11, 6)), {"momentum_buffer": torch.ones(11, 6)}
    optimizer = SGD([old], lr=0.1, momentum=0.9)
    optimizer.state[old] = state
    target, step = Target(model=model, optimizer=optimizer), RebindOptimizer(slots=(("embed.weight",),))
    memo = do(step, target)
    assert list(optimizer.state) == [model.embed.weight]
    undo(step, target, memo)
    assert dict(optimizer.state) == {old: state}


def test_a_parameter_whose_state_is_empty_gets_no_entry() -> None:
    model = Tiny()
    optimizer = SGD([model.embed.weight], lr=0.1)
    target = Target(model=model, optimizer=optimizer, released={"embed.weight": {}})
    do(RebindOptimizer(slots=(("embed.weight",),)), target)
    assert not optimizer.state
    assert not target.released


# --- create --------------------------------------------------------------------------------------------------------


def test_what_holds_several_of_the_named_parameters_is_in_the_group_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tiny()
    flat = nn.Parameter(torch.zeros(9))
    monkeypatch.setattr(fsdp1_flat, "holders", lambda model: {"a": flat, "b": flat, "c": model.embed.weight})
    target = Target(model=model)
    CREATE.do(CreateOptimizer(algorithm="SGD", names=("a", "c", "b"), options=()), target)
    (group,) = optimizer_of(target).param_groups
    assert [id(param) for param in group["params"]] == [id(flat), id(model.embed.weight)]


def test_a_created_optimizer_holds_the_named_parameters_with_the_options() -> None:
    target = Target(model=Tiny())
    options = (OptimizerOption(name="lr", value=0.5), OptimizerOption(name="betas", value=(0.8, 0.9)))
    step = CreateOptimizer(algorithm="AdamW", names=("layers.0.inner.weight", "embed.weight"), options=options)
    memo = do(step, target)
    (group,) = optimizer_of(target).param_groups
    assert isinstance(target.optimizer, AdamW)
    assert (group["lr"], group["betas"]) == (0.5, (0.8, 0.9))
    assert [id(p) for p in group["params"]] == [id(target.model.layers[0].inner.weight), id(target.model.embed.weight)]
    undo(step, target, memo)
    assert target.optimizer is None


def test_creating_is_refused_beside_a_given_optimizer_and_for_unknown_names() -> None:
    model = Tiny()
    target = Target(model=model, optimizer=SGD(model.parameters(), lr=0.1))
    assert problems(CreateOptimizer(algorithm="AdamW", names=("nose",), options=()), target) == (
        "plan.other-model at nose: the model has no such parameter",
        "optimizer.two at optimizer: the plan creates AdamW, and an optimizer (SGD) was given",
    )
