"""A plan run on a meta copy, as any rank of any world."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import AdamW as AdamWLive
from torch.testing._internal.distributed.fake_pg import FakeStore

from prepkit.applying.rehearse import RehearsalFailed, rehearse, rehearse_here
from prepkit.applying.rehearse.meta import meta_copy
from prepkit.applying.step_kinds import handlers
from prepkit.config import (
    BF16,
    DDP,
    FSDP1,
    FSDP2,
    AdamW,
    CheckpointBlocks,
    CompileBlocks,
    CompressHook,
    Config,
    Mesh,
    OffloadToCPU,
    Single,
    WrapClasses,
    WrapPaths,
    WrapRoot,
    WrapSize,
)
from prepkit.facts import Env
from prepkit.observe import observe
from prepkit.plan import Plan, because
from prepkit.planner import plan
from prepkit.steps import CompileModules, ShardUnits, Unit
from tests.support.drawn_part import THOROUGH
from tests.support.fragile_model import TOKENS, WORDS, Tiny, planned, stepped
from tests.support.gang import Gang

FULL = Config(
    engine=FSDP2(),
    precision=BF16(),
    compile=CompileBlocks(backend="eager"),
    checkpointing=CheckpointBlocks(),
    accumulation=2,
)


def kinds(made: Plan) -> list[str]:
    return [type(one.step).__name__ for one in made.steps]


# --- what torch makes is what was planned --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "rank"), [(1, 0), (2, 0), (2, 1), (3, 2), (8, 0), (8, 7), (512, 0), (512, 10), (512, 511)]
)
def test_fsdp2_shards_as_planned_and_as_chunk_cuts(world: int, rank: int) -> None:
    model = Tiny(torch.bfloat16)
    seen = rehearse_here(planned(FULL, model, world=world), model, rank=rank)
    assert seen.fine, str(seen)
    assert seen.units == ("", "layers.0", "layers.1", "layers.2")
    assert len(seen.params) == 1 + 3 * 5
    for name, form in seen.params:
        chunks = torch.chunk(torch.empty(form.shape), world)
        rows = len(chunks[rank]) if rank < len(chunks) else 0
        assert (name, form.local_shape) == (name, (rows, *form.shape[1:]))
        assert form.placements == ("shard(0)",)
        assert form.dtype == ("bfloat16" if name.endswith("scale") else "float32"), name


WORLDS = [(1, 0), (2, 1), (3, 2), (8, 3), (512, 511)]
MORE_WORLDS = [(2, 0), (8, 0), (8, 7), (512, 0), (512, 10)]
FLAT_ENGINES = {
    "full": FSDP1(),
    "grad-op": FSDP1(sharding="SHARD_GRAD_OP", wrap=WrapRoot()),
    "none": FSDP1(sharding="NO_SHARD"),
    "nested": FSDP1(wrap=WrapPaths(("layers.*", "layers.*.inner")), forward_prefetch=True),
    "flat": FSDP1(use_orig_params=False),
}


@pytest.mark.parametrize("engine", FLAT_ENGINES)
@pytest.mark.parametrize(("world", "rank"), WORLDS + MORE_WORLDS * THOROUGH)
def test_fsdp1_cuts_flat_parameters_as_planned_to_the_element(world: int, rank: int, engine: str) -> None:
    model = Tiny(torch.bfloat16)
    if engine == "flat":
        model.requires_grad_()
    for precision in (None, BF16()):
        cfg = evolve(FULL, engine=FLAT_ENGINES[engine], precision=precision, compile=None, accumulation=1)
        optimizer = AdamWLive(p for p in model.parameters() if p.requires_grad)
        model(TOKENS).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        made = planned(cfg, model, optimizer, world=world)
        seen = rehearse_here(made, model, rank=rank, optimizer=optimizer)
        assert seen.fine, str(seen)
        assert [one.flat is not None for one in made.layout] == [True] * 16


@pytest.mark.parametrize("engine", [FSDP1, FSDP2])
def test_a_unit_without_parameters_is_as_planned(engine: type[FSDP1 | FSDP2]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    cfg = Config(engine=engine(wrap=WrapClasses(("ReLU", "Linear"))), precision=BF16())
    made = plan(cfg, observe(model, env=Env(world_size=4)).facts).unwrap()
    found = rehearse_here(made, model, rank=3)
    assert found.fine, str(found)


def test_fsdp1_of_copies_cuts_each_of_them() -> None:
    model = Tiny()
    cfg = Config(engine=FSDP1(sharding="HYBRID_SHARD"), mesh=Mesh(replicate=2, shard=4))
    made = planned(cfg, model, world=8, device="cuda")
    seen = [rehearse_here(made, model, rank=rank) for rank in (1, 5, 7)]
    assert all(one.fine for one in seen), "\n".join(map(str, seen))
    assert [dict(one.params)["embed.weight"].shape for one in seen] == [(17,), (17,), (15,)]
    assert "the CPU stands in for cuda" in str(seen[0])


@pytest.mark.parametrize("wrong", [{"start": 4}, {"size": 1024}, {"original": False}, {"shards": 4}])
def test_a_flat_parameter_that_torch_cuts_in_another_way_is_a_difference(wrong: dict[str, Any]) -> None:
    model = Tiny()
    made = planned(Config(engine=FSDP1()), model, world=8)
    layout = tuple(
        evolve(one, flat=evolve(one.flat, **wrong)) if one.name == "layers.1.inner.bias" and one.flat else one
        for one in made.layout
    )
    seen = rehearse_here(evolve(made, layout=layout), model)
    assert [one.where for one in seen.differences] == ["model.layers.1.inner.bias"]


def test_hsdp_replicates_over_one_axis_and_shards_over_the_other() -> None:
    model = Tiny()
    cfg = Config(engine=FSDP2(), mesh=Mesh(replicate=2, shard=4))
    seen = [rehearse_here(planned(cfg, model, world=8), model, rank=rank) for rank in (1, 5, 7)]
    assert all(one.fine for one in seen), "\n".join(map(str, seen))
    forms = [dict(one.params)["embed.weight"] for one in seen]
    assert forms[0].placements == ("replicate", "shard(0)")
    assert [form.local_shape for form in forms] == [(3, 6), (3, 6), (2, 6)]
    assert WORDS == 11


@pytest.mark.parametrize(
    "engine",
    [FSDP2(wrap=WrapRoot()), FSDP2(wrap=WrapSize(70)), FSDP2(reshard_after_forward=2), FSDP2(offload=OffloadToCPU())],
    ids=["root", "size", "reshard", "offload"],
)
def test_other_ways_to_shard_are_as_planned(engine: FSDP2) -> None:
    model = Tiny()
    seen = rehearse_here(planned(Config(engine=engine), model, world=4, device="cuda"), model, rank=3)
    assert seen.fine, str(seen)


@pytest.mark.parametrize("engine", [Single(), DDP()])
def test_engines_that_keep_parameters_whole_are_as_planned(engine: Single | DDP) -> None:
    model = Tiny(torch.bfloat16)
    world = 1 if engine == Single() else 8
    cfg = evolve(FULL, engine=engine, optimizer=AdamW())
    seen = rehearse_here(planned(cfg, model, world=world, device="cuda"), model)
    assert seen.fine, str(seen)
    assert seen.units == ()
    assert dict(seen.params)["embed.weight"].cls == "Parameter"
    assert seen.slots[0] == tuple(name for name, form in seen.params if form.requires_grad)


def test_an_optimizer_follows_by_name_with_its_state_and_groups() -> None:
    model = Tiny()
    optimizer = stepped(model)
    made = planned(FULL, model, optimizer, world=8)
    assert kinds(made).index("ReleaseOptimizer") < kinds(made).index("RebindOptimizer")
    seen = rehearse_here(made, model, rank=3, optimizer=optimizer)
    assert seen.fine, str(seen)
    assert seen.slots == tuple(group.slots for group in made.facts.optimizer.groups)  # type: ignore[union-attr]
    assert all(slot for group in seen.slots for slot in group)


def test_an_optimizer_that_is_not_given_is_stood_in_for() -> None:
    model = Tiny()
    made = planned(FULL, model, stepped(model), world=8)
    seen = rehearse_here(made, model, rank=3)
    assert seen.fine, str(seen)
    assert [str(one) for one in seen.omitted if one.step == "optimizer"] == [
        "not rehearsed: optimizer: SGD stands in for AdamW, which was not given"
    ]
    assert seen.slots == tuple(group.slots for group in made.facts.optimizer.groups)  # type: ignore[union-attr]


# --- what is not as planned is said --------------------------------------------------------------------------------


def test_a_layout_that_torch_does_not_make_is_a_difference() -> None:
    model = Tiny()
    made = planned(FULL, model, world=8)
    layout = tuple(evolve(one, dtype="float16") if one.name == "layers.1.inner.bias" else one for one in made.layout)
    seen = rehearse_here(evolve(made, layout=layout), model)
    (one,) = seen.differences
    assert (one.rule, one.what) == ("run.other-layout", "dtype planned float16, found float32")
    assert not seen.fine
    assert "1 difference from the plan" in str(seen)


def test_a_tie_that_two_units_tear_apart_is_a_difference() -> None:
    model = Tiny()
    cfg = Config(engine=FSDP2(wrap=WrapPaths(("embed", "head"))))
    unchecked = plan(cfg, observe(model, env=Env(world_size=4)).facts, rules=()).unwrap()
    seen = rehearse_here(unchecked, model)
    assert [one.rule for one in seen.differences] == ["run.tie-broken"]


def test_a_step_that_is_refused_halts_the_rehearsal() -> None:
    model = Tiny()
    made = planned(Config(engine=FSDP2()), model, world=8)
    shard = next(one.step for one in made.steps if isinstance(one.step, ShardUnits))
    wrong = evolve(shard, units=(Unit(path="layers.9", reshard_after_forward=True), *shard.units))
    steps = tuple(evolve(one, step=wrong) if one.step is shard else one for one in made.steps)
    seen = rehearse_here(evolve(made, steps=steps), model)
    assert not seen.fine
    assert "layers.9" in seen.halted
    assert not dist.is_initialized()


def test_what_cannot_be_rehearsed_is_said() -> None:
    model = Tiny()
    cfg = Config(engine=DDP(), precision=BF16())
    told = [str(one) for one in rehearse_here(planned(cfg, model, world=8, device="cuda"), model).omitted]
    assert told == [
        "not rehearsed: StartProcessGroup: a fake group of 8 ranks stands in for nccl",
        "not rehearsed: Agree: the fake group carries no data, so there is nobody to ask",
        "not rehearsed: MoveModel: a meta copy has no data to move to cuda",
        "not rehearsed: AutocastForward: the CPU stands in for cuda",
        "not rehearsed: WrapDDP: a meta copy has no values to send",
    ]


def test_ddp_still_needs_values_so_that_sending_none_is_right() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(RuntimeError, match="meta"):
            nn.parallel.DistributedDataParallel(nn.Linear(2, 2, device="meta"))
    finally:
        dist.destroy_process_group()


class OlderDDP(nn.Module):
    """The signature, as far as it matters."""

    def __init__(self, module: nn.Module, device_ids: list[int] | None = None, static_graph: bool = False) -> None:
        raise AssertionError("a model on meta has nothing to send")


def test_a_ddp_that_cannot_be_told_to_send_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.6 has it."""
    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", OlderDDP)
    model = Tiny()
    seen = rehearse_here(planned(Config(engine=DDP()), model, world=8), model)
    assert seen.fine, str(seen)
    assert str(seen.omitted[-1]).startswith("not rehearsed: WrapDDP: DDP sends values")


def test_ddp_is_wrapped_with_its_options_and_hook_and_a_bfloat16_hook_is_left_out() -> None:
    model = Tiny()
    engine = DDP(bucket_cap_mb=1.0, static_graph=True, hook=CompressHook(dtype="float16"))
    made = planned(Config(engine=engine), model, world=4096)
    seen = rehearse_here(made, model, rank=4095)
    assert seen.fine, str(seen)
    low = planned(Config(engine=DDP(hook=CompressHook())), model, world=8, device="cuda")
    told = [str(one) for one in rehearse_here(low, model).omitted]
    assert told[-1] == "not rehearsed: WrapDDP: a meta copy has no values to send, and no NCCL for bfloat16"


@pytest.mark.parametrize(
    "cfg",
    [
        Config(engine=FSDP2(), mesh=Mesh(replicate=8, shard=512)),
        Config(engine=FSDP1(), precision=BF16()),
        Config(engine=DDP()),
    ],
    ids=["hsdp", "fsdp1", "ddp"],
)
def test_a_plan_for_4096_ranks_is_rehearsed_in_seconds(cfg: Config) -> None:
    model = Tiny(torch.bfloat16)
    began = time.monotonic()
    for rank in (0, 511, 4095):
        seen = rehearse_here(planned(cfg, model, world=4096), model, rank=rank)
        assert seen.fine, str(seen)
        assert (seen.rank, seen.world_size) == (rank, 4096)
    assert time.monotonic() - began < 150


# --- the caller is left alone --------------------------------------------------------------------------------------


def test_a_rehearsal_in_its_own_process_sees_what_one_here_sees() -> None:
    model = Tiny()
    optimizer = stepped(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = planned(FULL, model, optimizer, world=8)
    seen = rehearse(made, model, rank=5, optimizer=optimizer)
    assert seen.fine, str(seen)
    assert seen == rehearse_here(made, model, rank=5, optimizer=optimizer)
    assert not dist.is_initialized()
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert optimizer.param_groups[0]["params"][0] is model.embed.weight
    assert model(TOKENS).shape == (2, 4, WORDS)


def rehearse_beside_a_group(rank: int, world: int) -> tuple[bool, float]:
    model = Tiny()
    seen = rehearse(planned(FULL, model, world=512), model, rank=rank)
    total = torch.ones(())
    dist.all_reduce(total)
    with pytest.raises(RehearsalFailed, match="a process group runs in this process"):
        rehearse_here(planned(FULL, model, world=512), model)
    return seen.fine, total.item()


def test_a_running_group_goes_on_beside_a_rehearsal(gang2: Gang) -> None:
    assert gang2.run(rehearse_beside_a_group, timeout=120) == [(True, 2.0)] * 2


def test_a_model_that_cannot_travel_is_told_with_what_to_do() -> None:
    class Local(Tiny):
        pass

    model = Local()
    made = planned(FULL, model, world=2)
    with pytest.raises(RehearsalFailed, match=r"(?s)Local cannot travel.*rehearse_here"):
        rehearse(made, model)
    assert rehearse_here(made, model).fine


class Fatal(Tiny):
    """Ends the process that unpickles it."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        os._exit(7)

    def __deepcopy__(self, memo: dict[int, Any]) -> Fatal:
        return self


class Slow(Tiny):
    """Keeps the process that unpickles it busy."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        time.sleep(600)

    def __deepcopy__(self, memo: dict[int, Any]) -> Slow:
        return self


def test_a_process_that_dies_or_does_not_end_is_told() -> None:
    made = planned(FULL, Tiny(), world=2)
    with pytest.raises(RehearsalFailed, match="ended with exit code 7"):
        rehearse(made, Fatal())
    began = time.monotonic()
    with pytest.raises(RehearsalFailed, match="was not done after 1 s"):
        rehearse(made, Slow(), timeout_s=1)
    assert time.monotonic() - began < 10


def test_a_rank_outside_the_plan_is_refused_before_anything_starts() -> None:
    model = Tiny()
    made = planned(FULL, model, world=2)
    for call in (rehearse, rehearse_here):
        with pytest.raises(ValueError, match="rank 2 is not in a plan for 2 ranks; give one of 0 to 1"):
            call(made, model, rank=2)


# --- meta copy -----------------------------------------------------------------------------------------------------


def test_a_meta_copy_keeps_ties_buffers_and_the_optimizer_s_hold() -> None:
    model = Tiny()
    optimizer = stepped(model)
    twin, follower = meta_copy(model, optimizer)
    assert isinstance(twin, Tiny)
    assert follower is not None
    assert twin.head.weight is twin.embed.weight
    assert twin.embed.weight is not model.embed.weight
    assert dict(twin.named_buffers()).keys() == {"kept", "passing"}
    assert all(tensor.is_meta for tensor in (*twin.parameters(), *twin.buffers()))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert [p.requires_grad for p in twin.parameters()] == [p.requires_grad for p in model.parameters()]
    assert follower.param_groups[0]["params"][0] is twin.embed.weight
    assert all(value.is_meta for state in follower.state.values() for value in state.values())
    assert follower.param_groups[1]["lr"] == 0.5


def test_rehearsing_adds_nothing_to_what_a_module_says_of_its_buffers() -> None:
    model = Tiny()
    own = {
        path: (module._non_persistent_buffers_set, set(module._non_persistent_buffers_set))
        for path, module in model.named_modules()
    }
    rehearse_here(planned(FULL, model, world=2), model)
    for path, module in model.named_modules():
        kept, before = own[path]
        assert module._non_persistent_buffers_set is kept
        assert kept == before
    assert {name for _, names in own.values() for name in names} == {"passing"}


def test_a_step_that_no_handler_knows_cannot_be_rehearsed_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tiny()
    step = CompileModules(paths=("",), backend="eager", mode="default", fullgraph=False, dynamic=None)
    made = planned(Config(), model)
    known = {kind: handler for kind, handler in handlers().items() if kind is not CompileModules}
    monkeypatch.setattr("prepkit.applying.rehearse.handlers", lambda: known)
    seen = rehearse_here(evolve(made, steps=made.steps + because(step, "to be refused")), model)
    assert "apply.not-asked at CompileModules: has no handler" in seen.halted
