"""What a plan says of its steps, and which it leaves out where nothing asks for them."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from prepkit.config import (
    BF16,
    DDP,
    FP8,
    FSDP1,
    FSDP2,
    MSAMP,
    AdamW,
    BroadcastWeights,
    Config,
    DeepSpeed,
    DelayedScaling,
    InitWeights,
    Intent,
    Mesh,
    MXFP8BlockScaling,
    PowerSGDHook,
    Single,
    TensorParallel,
    TPLayer,
    TPPlan,
    TPPlanFromModel,
    TransformerEngine,
)
from prepkit.facts import Facts, ParamFact
from prepkit.plan import Planned
from prepkit.planner.replicated import communication
from prepkit.steps import (
    AutocastFP8Forward,
    AverageGradients,
    BuildMesh,
    ConvertSyncBatchNorm,
    InitializeDeepSpeed,
    InitializeTensors,
    MakeContiguous,
    MoveModel,
    ParallelizeModules,
    SendTensors,
    ShardLoader,
    WrapFSDP1,
)
from prepkit.testing import tiny_facts, tiny_loader, tiny_model
from prepkit.testing.tiny import LIBRARIES, with_batchnorm
from tests.support.plans import make

ROWS = TPPlan((TPLayer("layers.*.attn", "colwise"), TPLayer("layers.*.mlp", "rowwise", input_layout="replicate")))


def found(cfg: Config, facts: Facts, kind: type) -> list[Planned]:
    return [one for one in make(cfg, facts).steps if isinstance(one.step, kind)]


def only(cfg: Config, facts: Facts, kind: type) -> Planned:
    (one,) = found(cfg, facts, kind)
    return one


def float8(world: int = 1) -> Facts:
    facts = tiny_facts(tiny_model(width=16, vocab=16), world=world, device="cuda")
    return evolve(facts, env=evolve(facts.env, libraries=LIBRARIES, capability=(10, 0), bf16=True))


@pytest.mark.parametrize(
    ("wrapper", "expected"),
    [("none", None), ("float16", "fp16_compress_wrapper"), ("bfloat16", "bf16_compress_wrapper")],
)
def test_powersgd_is_wrapped_in_torch_s_hook_for_the_dtype(wrapper: Any, expected: str | None) -> None:
    hook = communication(PowerSGDHook(wrapper=wrapper))
    assert hook is not None
    assert (hook.hook, hook.wrapper) == ("powerSGD_hook", expected)


@pytest.mark.parametrize("intent", list(Intent))
def test_batch_norms_are_synchronized_for_training(intent: Intent) -> None:
    cfg = Config(engine=DDP(sync_batchnorm=True), intent=intent)
    facts = tiny_facts(with_batchnorm(tiny_model()), world=2, device="cuda", optimizer=intent is Intent.TRAINING)
    assert bool(found(cfg, facts, ConvertSyncBatchNorm)) is (intent is Intent.TRAINING)


def test_ms_amp_under_deepspeed_rests_on_its_own_behaviours_too() -> None:
    usual = ("DS-13", "DS-23", "DS-25", "DS-29")
    for precision, more in ((FP8(backend=MSAMP()), ("DS-1", "DP-12")), (BF16(), ())):
        cfg = Config(engine=DeepSpeed(stage=2, micro_batch=1), precision=precision)
        assert only(cfg, float8(2), InitializeDeepSpeed).behaviour_ids == (*usual, *more)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (DelayedScaling(), ("DelayedScaling", None)),
        (DelayedScaling(override_linear_precision=(False, True, False)), ("DelayedScaling", (False, True, False))),
        (MXFP8BlockScaling(), ("MXFP8BlockScaling", None)),
    ],
    ids=str,
)
def test_transformer_engine_gets_the_recipe_that_is_asked_for(recipe: Any, expected: tuple[Any, ...]) -> None:
    step = only(Config(precision=FP8(backend=TransformerEngine(recipe=recipe))), float8(), AutocastFP8Forward).step
    assert isinstance(step, AutocastFP8Forward)
    assert (step.recipe, step.override_linear_precision) == expected


def test_batch_norms_that_stay_wide_are_spoken_of() -> None:
    for model, said in ((tiny_model(), False), (with_batchnorm(tiny_model()), True)):
        facts = tiny_facts(model, world=2, optimizer=False)
        reason = only(Config(engine=FSDP1(), precision=BF16(), optimizer=AdamW()), facts, WrapFSDP1).reason
        assert reason.endswith("each is gathered alone" + "; batch norms stay in float32" * said)


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        (Mesh(), "parameters are sharded over all ranks"),
        (Mesh(replicate=2), "2 copies of the model, each sharded over 4 ranks"),
        (Mesh(tensor=2), "parameters are sharded over 4 ranks, and their layers cut over 2 neighbours"),
        (Mesh(replicate=2, tensor=2), "2 copies of the model, each sharded over 2 ranks, and their layers cut over 2"),
    ],
    ids=str,
)
def test_the_reason_of_a_mesh_says_what_its_axes_do(mesh: Mesh, expected: str) -> None:
    cfg = Config(engine=FSDP2(), mesh=mesh, tp_plan=ROWS)
    assert only(cfg, tiny_facts(world=8), BuildMesh).reason.startswith(expected)


@pytest.mark.parametrize(("world", "intent", "averages"), [
    (2, Intent.TRAINING, True), (1, Intent.TRAINING, False), (2, Intent.INFERENCE, False),
])  # fmt: skip
def test_whole_gradients_are_averaged_where_several_ranks_train(world: int, intent: Intent, averages: bool) -> None:
    model = tiny_model(extra=(ParamFact(name="norm.temperature", shape=(), dtype="float32"),))
    facts = tiny_facts(model, world=world, optimizer=intent is Intent.TRAINING)
    assert bool(found(Config(engine=FSDP2(), intent=intent), facts, AverageGradients)) is averages


@pytest.mark.parametrize(
    ("cfg", "world", "expected"),
    [
        (Config(), 1, ("DL-10", "DL-28")),
        (Config(engine=DDP()), 2, ("DL-15",)),
        (Config(engine=FSDP2(), mesh=Mesh(tensor=2), tp_plan=ROWS), 8, ("DL-15", "DL-6", "DL-7", "G-47")),
        (Config(engine=TensorParallel(), tp_plan=ROWS), 2, ("DL-15", "DL-6", "DL-7", "G-47")),
    ],
    ids=["one", "copies", "shards of parts", "parts"],
)
def test_a_divided_loader_rests_on_these_behaviours(cfg: Config, world: int, expected: tuple[str, ...]) -> None:
    assert only(cfg, tiny_facts(world=world, loader=tiny_loader()), ShardLoader).behaviour_ids == expected


def test_transposed_weights_are_laid_out_anew_unless_they_stay_whole() -> None:
    model = evolve(tiny_model(), strided=("embed.weight", "head.weight"))
    cfg = Config(engine=FSDP2(ignored=("head",)), optimizer=AdamW())
    step = only(cfg, tiny_facts(model, world=2, optimizer=False), MakeContiguous).step
    assert step == MakeContiguous(names=("embed.weight",))


@pytest.mark.parametrize(("devices", "moves"), [((), True), ((("", "cuda:0"),), True)])
def test_a_model_on_one_device_of_a_map_is_moved_unless_its_weights_are_quantised(
    devices: tuple[tuple[str, str], ...], moves: bool
) -> None:
    model = evolve(tiny_model(), device_map=devices)
    assert bool(found(Config(engine=Single()), tiny_facts(model, device="cuda"), MoveModel)) is moves


def test_layers_are_cut_by_the_model_s_own_plan_or_by_the_rows_of_the_config() -> None:
    model = evolve(tiny_model(), tensor_plan=(("layers.*.attn", "colwise"),))
    for rows, whose in ((TPPlanFromModel(), "the model's own plan"), (ROWS, "the rows of config.tp_plan")):
        cfg = Config(engine=TensorParallel(), tp_plan=rows)
        assert only(cfg, tiny_facts(model, world=2), ParallelizeModules).reason == f"{whose}, over 2 ranks"
        mesh = only(cfg, tiny_facts(model, world=2), BuildMesh).step
        assert isinstance(mesh, BuildMesh)
        assert [(axis.name, axis.size) for axis in mesh.axes] == [("tensor", 2)]


def test_weights_are_initialized_unit_by_unit_with_the_root_last() -> None:
    step = only(Config(engine=FSDP2(), weights=InitWeights(seed=3)), tiny_facts(world=2), InitializeTensors).step
    assert isinstance(step, InitializeTensors)
    assert (step.units, step.seed) == (("layers.0", "layers.1", ""), 3)


def test_flat_parameters_are_sent_as_their_elements_and_others_in_their_shape() -> None:
    facts = tiny_facts(world=2, optimizer=False)
    shapes = {}
    for engine in (FSDP1(), FSDP2()):
        step = only(Config(engine=engine, weights=BroadcastWeights(), optimizer=AdamW()), facts, SendTensors).step
        assert isinstance(step, SendTensors)
        shapes[type(engine)] = {tensor.name: tensor.shape for tensor in step.tensors}
    own = {param.name: param.shape for param in facts.model.params} | {"positions": (8,)}
    flat = {param.name: (param.numel,) for param in facts.model.params} | {"positions": (8,)}
    assert (shapes[FSDP1], shapes[FSDP2]) == (flat, own)
