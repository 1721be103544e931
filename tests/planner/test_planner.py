"""Plans of each engine: which steps, in which order, and what they lead to."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from attrs import evolve
from returns.pipeline import is_successful

from prepkit.config import (
    BF16,
    DDP,
    FP8,
    FP16,
    FSDP1,
    FSDP2,
    SGD,
    CheckpointBlocks,
    CompileBlocks,
    CompileModel,
    Config,
    DType,
    EachLoader,
    Engine,
    Intent,
    KeepLoaders,
    Mesh,
    OffloadToCPU,
    Precision,
    ShardLoaders,
    Single,
    TorchAO,
    TPLayer,
    TPPlan,
    WrapPaths,
    WrapRoot,
)
from prepkit.facts import Facts
from prepkit.plan import Plan
from prepkit.planner import PLANNERS, plan
from prepkit.planner.pieces import COLLECTIVES
from prepkit.steps import (
    AutocastForward,
    BuildMesh,
    CompileModules,
    CreateGradScaler,
    CreateOptimizer,
    LocalDevice,
    MoveModel,
    RebindOptimizer,
    ShardLoader,
    ShardUnits,
    StartProcessGroup,
    UpcastParameters,
    WrapDDP,
    WrapFSDP1,
    WrapLoader,
)
from prepkit.testing import tiny_facts, tiny_loader, tiny_model
from prepkit.testing.tiny import LIBRARIES, tiny_optimizer


def planned(cfg: Config, facts: Facts) -> Plan:
    result = plan(cfg, facts)
    assert is_successful(result), result.failure()
    return result.unwrap()


def kinds(made: Plan) -> tuple[str, ...]:
    return tuple(type(one.step).__name__ for one in made.steps)


def only(made: Plan, kind: type) -> object:
    (found,) = (one.step for one in made.steps if isinstance(one.step, kind))
    return found


def test_every_engine_has_a_planner() -> None:
    assert set(PLANNERS) == set(get_args(Engine))


def test_single_moves_casts_checkpoints_and_compiles_last() -> None:
    cfg = Config(precision=BF16(), checkpointing=CheckpointBlocks(), compile=CompileModel(backend="eager"))
    made = planned(cfg, tiny_facts(tiny_model(dtype="bfloat16")))
    assert kinds(made) == ("MoveModel", "UpcastParameters", "AutocastForward", "CheckpointModules", "CompileModules")


def test_ddp_wraps_after_block_compilation_and_before_whole_compilation() -> None:
    facts = tiny_facts(world=2)
    blocks = planned(Config(engine=DDP(), compile=CompileBlocks(backend="eager")), facts)
    assert kinds(blocks) == ("StartProcessGroup", "Agree", "MoveModel", "CompileModules", "WrapDDP")
    whole = planned(Config(engine=DDP(), compile=CompileModel(backend="eager")), facts)
    assert kinds(whole) == ("StartProcessGroup", "Agree", "MoveModel", "WrapDDP", "CompileModules")
    assert only(whole, CompileModules).paths == ("",)


def test_fsdp2_checkpoints_before_it_compiles_before_it_shards_between_release_and_rebind() -> None:
    cfg = Config(
        engine=FSDP2(), precision=BF16(), checkpointing=CheckpointBlocks(), compile=CompileBlocks(backend="eager")
    )
    made = planned(cfg, tiny_facts(tiny_model(dtype="bfloat16"), world=8))
    assert kinds(made) == (
        "StartProcessGroup",
        "Agree",
        "BuildMesh",
        "ReleaseOptimizer",
        "UpcastParameters",
        "CheckpointModules",
        "CompileModules",
        "ShardUnits",
        "RebindOptimizer",
    )
    shard = only(made, ShardUnits)
    assert [unit.path for unit in shard.units] == ["layers.0", "layers.1", ""]
    assert [unit.output_dtype for unit in shard.units] == [None, None, "float32"]
    assert [unit.reshard_after_forward for unit in shard.units] == [True, True, False]
    assert (shard.param_dtype, shard.reduce_dtype) == ("bfloat16", "float32")


@pytest.mark.parametrize("engine", [FSDP1(), FSDP2()], ids=["fsdp1", "fsdp2"])
def test_nothing_is_checkpointed_that_nobody_asked_to_checkpoint(engine: Engine) -> None:
    assert "CheckpointModules" not in kinds(planned(Config(engine=engine), tiny_facts(world=2)))


def test_frozen_parameters_are_not_upcast() -> None:
    model = tiny_model(dtype="bfloat16", frozen=("embed.weight",))
    made = planned(Config(engine=FSDP2(), precision=BF16()), tiny_facts(model, world=2))
    assert "embed.weight" not in only(made, UpcastParameters).names
    dtypes = {one.name: one.dtype for one in made.layout}
    assert (dtypes["embed.weight"], dtypes["head.weight"]) == ("bfloat16", "float32")


def test_an_optimizer_spec_becomes_an_optimizer_over_the_wrapped_parameters() -> None:
    facts = tiny_facts(tiny_model(frozen=("embed.weight",)), world=2, optimizer=False)
    made = planned(Config(engine=FSDP2(), optimizer=SGD(lr=0.5, momentum=0.9)), facts)
    assert kinds(made)[-1] == "CreateOptimizer"
    step = only(made, CreateOptimizer)
    assert (step.algorithm, "embed.weight" in step.names) == ("SGD", False)
    assert {option.name: option.value for option in step.options}["momentum"] == 0.9


def test_inference_wraps_nothing_under_ddp_and_shards_under_fsdp2() -> None:
    facts = tiny_facts(world=2, optimizer=False)
    assert "WrapDDP" not in kinds(planned(Config(engine=DDP(), intent=Intent.INFERENCE), facts))
    assert "ShardUnits" in kinds(planned(Config(engine=FSDP2(), intent=Intent.INFERENCE), facts))


def test_a_model_for_inference_is_sharded_on_the_device() -> None:
    facts = tiny_facts(world=2, device="cuda", optimizer=False)
    assert only(planned(Config(engine=FSDP2(), intent=Intent.INFERENCE), facts), BuildMesh).device == "cuda"
    flat = only(planned(Config(engine=FSDP1(), intent=Intent.INFERENCE), facts), WrapFSDP1)
    assert flat.device == LocalDevice(type="cuda")


@pytest.mark.parametrize("engine", [DDP(), FSDP1(), FSDP2()], ids=lambda engine: type(engine).__name__)
def test_ranks_agree_before_anything_is_changed(engine: Engine) -> None:
    assert kinds(planned(Config(engine=engine), tiny_facts(world=2)))[:2] == ("StartProcessGroup", "Agree")


@pytest.mark.parametrize("device", ["cuda", "xpu"])
@pytest.mark.parametrize("engine", [DDP(), FSDP1(), FSDP2()], ids=lambda engine: type(engine).__name__)
def test_the_scaler_is_that_of_the_device_and_sharded_under_fsdp1_alone(engine: Engine, device: str) -> None:
    facts = tiny_facts(world=2, device=device)
    scaler = only(planned(Config(engine=engine, precision=FP16()), facts), CreateGradScaler)
    assert (scaler.device, scaler.sharded) == (device, isinstance(engine, FSDP1))
    assert "CreateGradScaler" not in kinds(planned(Config(engine=engine), facts))


def test_tensor_ranks_are_sent_the_same_batches() -> None:
    facts = tiny_facts(world=4, loader=tiny_loader())
    layers = TPPlan((TPLayer("layers.*.attn", "colwise"),))
    cfg = Config(engine=FSDP2(), mesh=Mesh(tensor=2), tp_plan=layers, loaders=ShardLoaders(dispatch=True))
    sent = only(planned(cfg, facts), ShardLoader)
    assert (sent.dispatch, sent.axes) == (True, ("shard",))


def test_replicas_of_cut_layers_are_refused_where_nothing_is_sharded() -> None:
    layers = TPPlan((TPLayer("layers.*.attn", "colwise"),))
    cfg = Config(engine=FSDP2(), mesh=Mesh(replicate=2, shard=1, tensor=2), tp_plan=layers)
    assert [one.rule for one in plan(cfg, tiny_facts(world=4)).failure()] == ["mesh.nothing-sharded"]


BACKENDS = {
    "cpu": "gloo",
    "mlu": "cncl",
    "sdaa": "tccl",
    "musa": "mccl",
    "npu": "hccl",
    "hpu": "hccl",
    "cuda": "nccl",
    "xpu": "xccl",
    "neuron": "neuron",
}
"""As row ST-3 of the reference has them, written out a second time: a table compared with itself cannot be wrong."""


def test_the_accelerator_kinds_are_those_of_the_reference() -> None:
    assert set(COLLECTIVES) == set(BACKENDS)


@pytest.mark.parametrize("device", BACKENDS)
def test_every_accelerator_kind_has_its_collectives_and_its_local_device(device: str) -> None:
    made = planned(Config(engine=DDP()), tiny_facts(world=2, device=device))
    assert only(made, StartProcessGroup).backend == BACKENDS[device]
    assert only(made, WrapDDP).device == LocalDevice(type=device) == only(made, MoveModel).device


@pytest.mark.parametrize("device", BACKENDS)
def test_flat_units_are_made_on_the_local_device_of_every_kind(device: str) -> None:
    made = planned(Config(engine=FSDP1()), tiny_facts(world=2, device=device))
    assert only(made, WrapFSDP1).device == LocalDevice(type=device)


def test_a_backend_that_is_asked_for_is_started_whatever_the_device() -> None:
    made = planned(Config(engine=DDP(), backend="smddp"), tiny_facts(world=2, device="cuda"))
    assert only(made, StartProcessGroup).backend == "smddp"


def test_offload_on_an_accelerator_asks_for_a_cpu_backend_as_well() -> None:
    flat = planned(Config(engine=FSDP1(offload=True)), tiny_facts(world=2, device="cuda"))
    assert only(flat, StartProcessGroup).backend == "cpu:gloo,cuda:nccl"
    assert (
        only(planned(Config(engine=FSDP1()), tiny_facts(world=2, device="cuda")), StartProcessGroup).backend == "nccl"
    )
    offload = Config(engine=FSDP2(offload=OffloadToCPU()))
    made = planned(offload, tiny_facts(world=2, device="cuda"))
    assert only(made, StartProcessGroup).backend == "cpu:gloo,cuda:nccl"
    assert only(made, ShardUnits).pin_memory
    assert not only(planned(offload, tiny_facts(world=2)), ShardUnits).pin_memory


def test_hsdp_has_a_mesh_of_two_axes_and_shards_over_the_second() -> None:
    made = planned(Config(engine=FSDP2(), mesh=Mesh(replicate=2)), tiny_facts(world=8))
    assert [(axis.name, axis.size) for axis in only(made, BuildMesh).axes] == [("replicate", 2), ("shard", 4)]
    assert {one.placements for one in made.layout} == {("replicate", "shard(0)")}


def test_a_model_that_a_device_map_spreads_is_neither_moved_nor_given_device_ids() -> None:
    spread = evolve(tiny_model(), device_map=(("embed", "cuda:0"), ("layers", "cuda:1")))
    made = planned(Config(engine=DDP(), keep_device_map=True), tiny_facts(spread, world=2, device="cuda"))
    assert "MoveModel" not in kinds(made)
    assert only(made, WrapDDP).device is None
    alone = planned(Config(), tiny_facts(spread, device="cuda"))
    assert "MoveModel" not in kinds(alone)


def test_every_option_of_ddp_reaches_the_plan() -> None:
    usual = DDP()
    changes: dict[str, Any] = {"bucket_cap_mb": 3.0} | {
        name: not getattr(usual, name)
        for name in ("broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")
    }
    for name, value in changes.items():  # one at a time: some do not go together
        step = only(planned(Config(engine=evolve(usual, **{name: value})), tiny_facts(world=2)), WrapDDP)
        assert {field: getattr(step, field) for field in changes} == {
            field: value if field == name else getattr(usual, field) for field in changes
        }


def test_only_state_that_exists_makes_ddp_rebind() -> None:
    facts = tiny_facts(world=2)
    assert "RebindOptimizer" not in kinds(planned(Config(engine=DDP()), facts))
    assert facts.optimizer is not None
    stepped = evolve(facts, optimizer=evolve(facts.optimizer, stateful=("norm.weight",)))
    slots = only(planned(Config(engine=DDP()), stepped), RebindOptimizer).slots
    assert slots == tuple(group.slots for group in facts.optimizer.groups)


def test_loaders_are_sharded_unless_they_are_kept() -> None:
    facts = tiny_facts(world=2, loader=tiny_loader(sampler="random"))
    seeded = only(planned(Config(engine=DDP(), loaders=ShardLoaders(seed=3)), facts), ShardLoader)
    assert (seeded.shuffle, seeded.seed) == (True, 3)
    assert "ShardLoader" not in kinds(planned(Config(engine=DDP(), loaders=KeepLoaders()), facts))
    alone = evolve(facts, env=evolve(facts.env, world_size=1))
    assert only(planned(Config(), alone), ShardLoader).shuffle  # the order is the same on any number of ranks
    in_order = evolve(alone, loaders=(tiny_loader(sampler="sequential"),))
    assert "ShardLoader" not in kinds(planned(Config(), in_order))


def test_every_loader_is_wrapped_for_its_purpose() -> None:
    facts = evolve(tiny_facts(world=2, device="cuda"), loaders=(tiny_loader(), tiny_loader(length=37)))
    choices = EachLoader((ShardLoaders(), ShardLoaders(purpose="evaluation", to_device=False)))
    made = planned(Config(engine=DDP(), loaders=choices), facts)
    train, evaluate = (one.step for one in made.steps if isinstance(one.step, WrapLoader))
    assert (train.device, train.ends_window, train.evaluation) == (LocalDevice(type="cuda"), True, False)
    assert (evaluate.device, evaluate.ends_window, evaluate.evaluation) == (None, False, True)
    assert [one.step.spread for one in made.steps if isinstance(one.step, ShardLoader)] == [False, True]
    kept = planned(Config(engine=DDP(), loaders=KeepLoaders(ends_window=False)), facts)
    assert [one.step.ends_window for one in kept.steps if isinstance(one.step, WrapLoader)] == [False, False]


@pytest.mark.parametrize(
    ("changes", "world", "split"),
    [
        ({}, 2, "samples"),
        ({"sampler": "custom"}, 2, "sampler"),
        ({"custom_batches": True, "batches": 9, "batch_size": None}, 2, "batches"),
        ({"iterable": True}, 2, "stream"),
        ({"iterable": True, "shards": 4}, 2, "shards"),
        ({"iterable": True, "shards": 4}, 3, "stream"),
    ],
)
def test_a_loader_is_divided_as_it_draws(changes: dict[str, Any], world: int, split: str) -> None:
    facts = tiny_facts(world=world, loader=tiny_loader(**changes))
    assert only(planned(Config(engine=DDP()), facts), ShardLoader).split == split
    sent = only(planned(Config(engine=DDP(), loaders=ShardLoaders(dispatch=True)), facts), ShardLoader)
    assert (sent.dispatch, sent.split) == (True, "stream" if changes.get("iterable") else split)


def test_a_plan_says_how_many_samples_are_read_twice() -> None:
    def reason(length: int, how: ShardLoaders) -> str:
        facts = tiny_facts(world=4, loader=tiny_loader(length=length, batch_size=2))
        made = planned(Config(engine=DDP(), loaders=how), facts)
        return next(one.reason for one in made.steps if isinstance(one.step, ShardLoader))

    assert reason(10, ShardLoaders()).endswith("; 2 of 10 samples are read twice")
    assert "twice" not in reason(12, ShardLoaders()) + reason(10, ShardLoaders(drop_last=True))
    assert "twice" not in reason(37, ShardLoaders(purpose="evaluation"))
    assert "1 of 3 samples are read twice; gather_for_metrics" in reason(3, ShardLoaders(purpose="evaluation"))


def test_a_batch_is_split_over_the_ranks_where_that_is_asked_for() -> None:
    facts = tiny_facts(world=2, loader=tiny_loader(batch_size=4))
    cfg = Config(engine=DDP(), loaders=ShardLoaders(split_batches=True))
    assert only(planned(cfg, facts), ShardLoader).batch_size == 2


def test_the_root_alone_holds_everything_when_nothing_is_wrapped() -> None:
    made = planned(Config(engine=FSDP2(wrap=WrapRoot())), tiny_facts(world=2))
    assert {one.unit for one in made.layout} == {""}
    assert "gathered at once" in next(one.reason for one in made.steps if isinstance(one.step, ShardUnits))


def test_the_plan_names_its_owners_and_where_it_comes_from() -> None:
    low = tiny_facts(tiny_model(dtype="bfloat16"))
    assert planned(Config(), low).owners.master_weights.startswith("none: ")
    assert "float32" in planned(Config(precision=BF16()), low).owners.master_weights
    made = planned(Config(accumulation=4), tiny_facts())
    assert made.owners.accumulation_steps == 4
    assert made.provenance.config != planned(Config(), tiny_facts()).provenance.config


def test_an_overridden_error_is_in_the_plan_and_a_standing_one_refuses_it() -> None:
    facts = tiny_facts(world=2)
    assert not is_successful(plan(Config(engine=Single()), facts))
    made = planned(Config(engine=Single(), overrides=("mesh.single-many-ranks",)), facts)
    assert [finding.rule for finding in made.overridden] == ["mesh.single-many-ranks"]


def test_a_refusal_holds_every_finding() -> None:
    wrong = Config(engine=Single(), accumulation=0, scheduler_ticks=-1)
    rules = {finding.rule for finding in plan(wrong, tiny_facts(world=2)).failure()}
    assert len(rules) >= 3


def test_autocast_is_for_engines_without_a_precision_of_their_own() -> None:
    assert only(planned(Config(precision=BF16()), tiny_facts()), AutocastForward).dtype == "bfloat16"
    assert "AutocastForward" not in kinds(planned(Config(engine=FSDP2(), precision=BF16()), tiny_facts(world=2)))


@pytest.mark.parametrize(("engine", "moved"), [(Single(), True), (DDP(), True), (FSDP2(), False)])
def test_what_is_placed_by_whom(engine: Any, moved: bool) -> None:
    world = 1 if isinstance(engine, Single) else 2
    made = planned(Config(engine=engine), tiny_facts(world=world, device="cuda"))
    assert ("MoveModel" in kinds(made)) is moved  # fully_shard places what it shards


@pytest.mark.parametrize("engine", [Single(), DDP()])
def test_inference_keeps_precision_placement_and_compilation(engine: Any) -> None:
    cfg = Config(engine=engine, precision=BF16(), compile=CompileModel(), intent=Intent.INFERENCE)
    facts = tiny_facts(tiny_model(dtype="bfloat16"), world=1 if isinstance(engine, Single) else 2, optimizer=False)
    made = planned(cfg, facts)
    found = [kind for kind in kinds(made) if kind not in ("StartProcessGroup", "Agree")]
    assert found == ["MoveModel", "AutocastForward", "CompileModules"]  # and no float32 copies of what is not trained
    assert {one.dtype for one in made.layout} == {"bfloat16"}


def test_float16_has_a_scaler_for_training_alone_and_float16_units_under_fsdp2() -> None:
    facts = tiny_facts(world=2, device="cuda")
    scaler = only(planned(Config(engine=DDP(), precision=FP16(init_scale=8.0)), facts), CreateGradScaler)
    assert (scaler.device, scaler.sharded, scaler.init_scale) == ("cuda", False, 8.0)
    sharded = planned(Config(engine=FSDP2(), precision=FP16()), facts)
    units = only(sharded, ShardUnits)
    assert (units.param_dtype, units.reduce_dtype, units.units[-1].output_dtype) == ("float16", "float32", "float32")
    assert sharded.owners.loss_scaling == "prepkit"
    idle = Config(engine=DDP(), precision=FP16(), intent=Intent.INFERENCE)
    made = planned(idle, evolve(facts, optimizer=None))
    assert "CreateGradScaler" not in kinds(made)
    assert only(made, AutocastForward).dtype == "float16"
    assert made.owners.loss_scaling == "nobody"


def test_nothing_is_compiled_that_was_not_asked_for() -> None:
    assert "CompileModules" not in kinds(planned(Config(), tiny_facts()))


@pytest.mark.parametrize("how", [CompileModel, CompileBlocks])
def test_every_option_of_compiling_reaches_the_plan(how: type[CompileModel | CompileBlocks]) -> None:
    asked = how(backend="aot_eager", fullgraph=True, dynamic=True)
    step = only(planned(Config(compile=asked), tiny_facts()), CompileModules)
    assert (step.backend, step.mode, step.fullgraph, step.dynamic) == ("aot_eager", "default", True, True)
    other = only(planned(Config(compile=how(mode="reduce-overhead")), tiny_facts()), CompileModules)
    assert (other.backend, other.mode, other.fullgraph, other.dynamic) == ("inductor", "reduce-overhead", False, None)


# --- FSDP1 -----------------------------------------------------------------------------------------------------------


def test_fsdp1_wraps_after_block_compilation_and_before_whole_compilation() -> None:
    facts = tiny_facts(tiny_model(dtype="bfloat16"), world=8)
    cfg = Config(engine=FSDP1(), precision=BF16(), checkpointing=CheckpointBlocks(), compile=CompileBlocks())
    assert kinds(planned(cfg, facts)) == (
        "StartProcessGroup",
        "Agree",
        "BuildMesh",
        "ReleaseOptimizer",
        "UpcastParameters",
        "AutocastForward",
        "CheckpointModules",
        "CompileModules",
        "WrapFSDP1",
        "RebindOptimizer",
    )
    whole = planned(evolve(cfg, compile=CompileModel()), facts)
    assert kinds(whole)[-3:] == ("WrapFSDP1", "CompileModules", "RebindOptimizer")


def test_without_original_parameters_the_optimizer_is_regrouped() -> None:
    made = planned(Config(engine=FSDP1(use_orig_params=False)), tiny_facts(world=2))
    assert kinds(made)[-2:] == ("WrapFSDP1", "RegroupOptimizer")


@pytest.mark.parametrize(
    ("engine", "mesh", "world", "per_node", "found"),
    [
        (FSDP1(), None, 8, None, [("shard", 8)]),
        (FSDP1(sharding="NO_SHARD"), None, 8, None, [("replicate", 8)]),
        (FSDP1(sharding="HYBRID_SHARD"), None, 16, 8, [("replicate", 2), ("shard", 8)]),
        (FSDP1(sharding="HYBRID_SHARD_ZERO2"), Mesh(replicate=2), 8, None, [("replicate", 2), ("shard", 4)]),
    ],
)
def test_a_strategy_gives_the_mesh_its_axes(
    engine: FSDP1, mesh: Mesh | None, world: int, per_node: int | None, found: list[tuple[str, int]]
) -> None:
    facts = tiny_facts(world=world)
    facts = evolve(facts, env=evolve(facts.env, per_node=per_node))
    made = planned(Config(engine=engine, mesh=mesh), facts)
    assert [(axis.name, axis.size) for axis in made.mesh] == found
    assert only(made, WrapFSDP1).sharding == engine.sharding


@pytest.mark.parametrize(
    ("precision", "asked", "dtypes"),
    [
        (None, None, (None, None, None)),
        (BF16(), None, ("bfloat16", "float32", None)),
        (BF16(reduce_dtype="bfloat16"), "float32", ("bfloat16", "bfloat16", "float32")),
        (FP16(), "bfloat16", ("float16", "float32", "bfloat16")),
        (FP8(backend=TorchAO(emulate=True, keep_first_and_last=False)), None, ("bfloat16", "float32", None)),
    ],
)
def test_a_precision_gives_the_dtypes_in_which_flat_parameters_are_computed_reduced_and_buffered(
    precision: Precision, asked: DType | None, dtypes: tuple[str | None, ...]
) -> None:
    facts = tiny_facts(tiny_model(width=16, vocab=16), world=2, device="cuda")
    facts = evolve(facts, env=evolve(facts.env, libraries=LIBRARIES))
    made = only(planned(Config(engine=FSDP1(buffer_dtype=asked), precision=precision), facts), WrapFSDP1)
    assert (made.param_dtype, made.reduce_dtype, made.buffer_dtype) == dtypes


def test_one_rank_has_nothing_to_cut_so_torch_is_not_asked_to() -> None:
    made = planned(Config(engine=FSDP1()), tiny_facts())
    assert only(made, WrapFSDP1).sharding == "NO_SHARD"
    assert {one.flat.shards for one in made.layout if one.flat} == {1}


def test_a_frozen_parameter_is_upcast_with_its_unit_and_left_alone_in_a_frozen_one() -> None:
    frozen = ("layers.0.attn.weight", "layers.1.attn.weight", "layers.1.mlp.weight")
    made = planned(
        Config(engine=FSDP1(), precision=BF16()), tiny_facts(tiny_model(dtype="bfloat16", frozen=frozen), world=2)
    )
    names = only(made, UpcastParameters).names
    assert "layers.0.attn.weight" in names
    assert not {"layers.1.attn.weight", "layers.1.mlp.weight"} & set(names)
    assert {one.name: one.dtype for one in made.layout}["layers.1.mlp.weight"] == "bfloat16"


@pytest.mark.parametrize("engine", [Single(), DDP(), FSDP2(), FSDP1()], ids=["single", "ddp", "fsdp2", "fsdp1"])
def test_without_master_weights_nothing_is_upcast_and_the_dtypes_to_compute_in_are_the_same(engine: Engine) -> None:
    facts = tiny_facts(tiny_model(dtype="bfloat16"), world=1 if isinstance(engine, Single) else 2)
    made = planned(Config(engine=engine, precision=BF16(master_weights=False)), facts)
    kept = planned(Config(engine=engine, precision=BF16()), facts)
    assert [kind for kind in kinds(kept) if kind != "UpcastParameters"] == list(kinds(made)) != list(kinds(kept))
    assert {one.dtype for one in made.layout} == {"bfloat16"}
    if isinstance(engine, FSDP1 | FSDP2):
        step = only(made, WrapFSDP1 if isinstance(engine, FSDP1) else ShardUnits)
        assert (step.param_dtype, step.reduce_dtype) == ("bfloat16", "float32")


def test_a_unit_starts_each_parameter_at_sixteen_bytes_of_what_it_computes_in() -> None:
    model = tiny_model(width=3, vocab=5)
    starts = {}
    for precision in (Config().precision, BF16()):
        made = planned(Config(engine=FSDP1(wrap=WrapRoot()), precision=precision), tiny_facts(model, world=2))
        starts[type(precision).__name__] = [one.flat.start for one in made.layout if one.flat][:3]
    assert starts == {"NoneType": [0, 16, 28], "BF16": [0, 16, 32]}


def test_ignored_modules_are_in_no_unit_and_in_no_flat_parameter() -> None:
    facts = tiny_facts(tiny_model(frozen=("layers.0.attn.weight", "layers.0.mlp.weight", "head.weight")), world=4)
    facts = evolve(facts, optimizer=tiny_optimizer(facts.model))
    made = planned(Config(engine=FSDP1(ignored=("layers.0", "head"))), facts)
    step = only(made, WrapFSDP1)
    assert step.ignored == ("layers.0", "head")
    assert [unit.path for unit in step.units] == ["layers.1", ""]
    assert [one.name for one in made.layout if one.flat is None] == [
        "layers.0.attn.weight",
        "layers.0.mlp.weight",
        "head.weight",
    ]


def test_inference_is_sharded_under_fsdp1_too() -> None:
    facts = tiny_facts(world=2, optimizer=False)
    made = planned(Config(engine=FSDP1(wrap=WrapPaths(("head",))), intent=Intent.INFERENCE), facts)
    assert "WrapFSDP1" in kinds(made)
