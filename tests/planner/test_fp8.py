"""Which layers float8 takes, which steps it needs, and what its rules say beyond their golden messages."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from prepkit.config import (
    DDP,
    FP8,
    FSDP2,
    MSAMP,
    SGD,
    XLA,
    AdamW,
    CheckpointBlocks,
    CompileModel,
    Config,
    Intent,
    KeepLoaders,
    Mesh,
    Single,
    TorchAO,
    TransformerEngine,
)
from prepkit.facts import ClassFact, Env, Facts, ModelFacts
from prepkit.plan import Plan
from prepkit.planner import plan
from prepkit.resolve.fp8 import kept_wide, linears, norms
from prepkit.resolve.resolved import Resolved
from prepkit.rules import check
from prepkit.steps import AutocastFP8Forward, ConvertFP8Linears, InitializeMSAMP
from prepkit.testing import tiny_facts, tiny_model
from prepkit.testing.tiny import LIBRARIES

TE, AO = FP8(backend=TransformerEngine()), FP8(backend=TorchAO())
FOUR = ("layers.0.attn", "layers.0.mlp", "layers.1.attn", "layers.1.mlp")


def fp8_linears(cfg: Config, model: ModelFacts) -> tuple[str, ...]:
    return Resolved(cfg=cfg, facts=tiny_facts(model)).fp8_linears


def facts(model: ModelFacts | None = None, *, world: int = 1, **env: Any) -> Facts:
    made = tiny_facts(model or tiny_model(width=16, vocab=16), world=world, device="cuda")
    return evolve(made, env=evolve(made.env, **{"libraries": LIBRARIES, "capability": (10, 0), **env}))


def planned(cfg: Config, seen: Facts) -> Plan:
    return plan(cfg, seen).unwrap()


def kinds(cfg: Config, seen: Facts) -> tuple[str, ...]:
    return tuple(type(one.step).__name__ for one in planned(cfg, seen).steps)


def said(rule: str, cfg: Config, seen: Facts) -> list[str]:
    return [finding.what for finding in check(cfg, seen) if finding.rule == rule]


def resized(model: ModelFacts, **shapes: tuple[int, ...]) -> ModelFacts:
    named = {name.replace("__", "."): shape for name, shape in shapes.items()}
    return evolve(model, params=tuple(evolve(p, shape=named.get(p.name, p.shape)) for p in model.params))


def with_class(model: ModelFacts, path: str, cls: ClassFact) -> ModelFacts:
    index = len(model.classes)
    modules = tuple(evolve(m, cls=index) if m.path == path else m for m in model.modules)
    return evolve(model, classes=(*model.classes, cls), modules=modules)


# --- which layers --------------------------------------------------------------------------------------------------


def test_torchao_leaves_the_first_and_the_last_linear_unless_told_otherwise() -> None:
    model = tiny_model(width=16, vocab=16)
    assert fp8_linears(Config(precision=AO), model) == FOUR[1:]
    every = FP8(backend=TorchAO(keep_first_and_last=False))
    assert fp8_linears(Config(precision=every), model) == (*FOUR, "head")


@pytest.mark.parametrize("precision", [AO, TE], ids=["torchao", "te"])
def test_one_odd_linear_never_stops_its_siblings(precision: FP8) -> None:
    model = resized(tiny_model(width=16, vocab=16), layers__1__attn__weight=(16, 24))
    found = fp8_linears(Config(precision=precision), model)
    assert "layers.1.attn" not in found
    assert {"layers.0.mlp", "layers.1.mlp"} <= set(found)


def test_the_odd_linear_counts_as_the_first() -> None:
    model = resized(tiny_model(width=16, vocab=16), layers__0__attn__weight=(5, 16))
    assert fp8_linears(Config(precision=AO), model) == FOUR[1:]


def test_patterns_leave_what_they_match() -> None:
    model = tiny_model(width=16, vocab=16)
    skip = FP8(backend=TorchAO(skip=("layers.*.attn",)))
    assert fp8_linears(Config(precision=skip), model) == ("layers.0.mlp", "layers.1.mlp")
    skip = FP8(backend=TransformerEngine(skip=("head", "layers.0.mlp")))
    assert fp8_linears(Config(precision=skip), model) == ("layers.0.attn", "layers.1.attn", "layers.1.mlp")


def test_a_tied_linear_is_taken_only_where_its_parameter_stays_the_same() -> None:
    model = tiny_model(width=16, vocab=16, tied=True)
    every = FP8(backend=TorchAO(keep_first_and_last=False))
    assert "head" in fp8_linears(Config(precision=every), model)
    assert "head" not in fp8_linears(Config(engine=FSDP2(), precision=every), model)
    assert "head" not in fp8_linears(Config(precision=TE), model)
    ms_amp = Config(precision=FP8(backend=MSAMP()))
    assert "head" not in fp8_linears(ms_amp, model)
    assert kept_wide(model) == ("head",)


def test_a_subclass_of_linear_is_left_by_all_but_ms_amp() -> None:
    special = ClassFact(name="RouterLinear", module="tiny", mro=("Linear",))
    model = with_class(tiny_model(width=16, vocab=16), "layers.0.mlp", special)
    assert "layers.0.mlp" not in {one.path for one in linears(model)}
    ms_amp = Config(precision=FP8(backend=MSAMP()))
    assert "layers.0.mlp" in fp8_linears(ms_amp, model)
    params = (evolve(p, cls="Params4bit") if p.name == "layers.0.mlp.weight" else p for p in model.params)
    packed = evolve(model, params=tuple(params))
    assert "layers.0.mlp" not in fp8_linears(ms_amp, packed)
    assert kept_wide(packed) == ("layers.0.mlp",)


def test_norms_need_a_bias_to_be_taken() -> None:
    model = tiny_model(width=16, vocab=16)
    assert norms(Config(precision=TE), model) == ()
    (weight,) = [param for param in model.params if param.name == "norm.weight"]
    with_bias = evolve(model, params=(*model.params, evolve(weight, name="norm.bias")))
    assert norms(Config(precision=TE), with_bias) == ("norm",)
    assert norms(Config(precision=FP8(backend=TransformerEngine(convert_norms=False))), with_bias) == ()
    assert norms(Config(precision=AO), with_bias) == ()


def test_a_model_of_one_linear_at_its_root_has_nothing_to_replace() -> None:
    model = tiny_model(width=16, vocab=16)
    root = evolve(model, modules=(evolve(model.modules[0], cls=4),), params=())
    assert linears(root) == ()


# --- which steps ---------------------------------------------------------------------------------------------------


def test_conversion_is_the_first_change_of_the_model() -> None:
    cfg = Config(precision=AO, checkpointing=CheckpointBlocks(), compile=CompileModel(backend="eager"))
    rest = ("CheckpointModules", "CompileModules")
    assert kinds(cfg, facts()) == ("ConvertFP8Linears", "MoveModel", "AutocastForward", *rest)
    group = ("StartProcessGroup", "Agree")
    around = ("MoveModel", "AutocastForward", "CheckpointModules", "WrapDDP", "CompileModules")
    assert kinds(evolve(cfg, engine=DDP()), facts(world=2)) == (*group, "ConvertFP8Linears", *around)


def test_fsdp2_stores_the_dtype_first_and_computes_scales_last() -> None:
    cfg = Config(engine=FSDP2(), precision=AO, checkpointing=CheckpointBlocks())
    seen = facts(tiny_model(width=16, vocab=16, dtype="bfloat16"), world=2)
    assert kinds(cfg, seen)[2:] == (
        "BuildMesh",
        "ReleaseOptimizer",
        "UpcastParameters",
        "ConvertFP8Linears",
        "CheckpointModules",
        "ShardUnits",
        "RebindOptimizer",
        "PrecomputeFloat8Scales",
    )


@pytest.mark.parametrize(
    ("engine", "backend", "gathers"),
    [
        (FSDP2(), TorchAO(), True),
        (FSDP2(), TorchAO(recipe="rowwise"), False),
        (FSDP2(), TorchAO(float8_all_gather=False), False),
        (FSDP2(), TorchAO(float8_all_gather=True), True),
        (DDP(), TorchAO(), False),
    ],
)
def test_weights_are_gathered_in_float8_where_they_can_be(engine: DDP | FSDP2, backend: TorchAO, gathers: bool) -> None:
    made = planned(Config(engine=engine, precision=FP8(backend=backend)), facts(world=2))
    (step,) = [one.step for one in made.steps if isinstance(one.step, ConvertFP8Linears)]
    assert step.all_gather is gathers
    assert ("PrecomputeFloat8Scales" in {type(one.step).__name__ for one in made.steps}) is gathers


def test_without_an_optimizer_nothing_waits_for_its_steps() -> None:
    seen = evolve(facts(world=2), optimizer=None)
    assert "PrecomputeFloat8Scales" not in kinds(Config(engine=FSDP2(), precision=AO), seen)
    assert kinds(Config(engine=FSDP2(), precision=AO, optimizer=AdamW()), seen)[-2:] == (
        "CreateOptimizer",
        "PrecomputeFloat8Scales",
    )


def test_transformer_engine_is_inside_compilation_and_around_ddp() -> None:
    cfg = Config(precision=TE, compile=CompileModel(backend="eager"))
    assert kinds(cfg, facts())[2:5] == ("AutocastForward", "AutocastFP8Forward", "CompileModules")
    wrapped = kinds(evolve(cfg, engine=DDP()), facts(world=2))
    assert wrapped[-4:] == ("WrapDDP", "AutocastFP8Forward", "CompileModules", "RebindOptimizer")


def test_a_fresh_optimizer_follows_only_where_parameters_are_replaced() -> None:
    assert "RebindOptimizer" in kinds(Config(precision=TE), facts())
    assert "RebindOptimizer" not in kinds(Config(precision=AO), facts())


def test_a_model_of_transformer_engines_layers_is_only_run_under_its_autocast() -> None:
    own = ClassFact(name="Linear", module="transformer_engine.pytorch.module.linear")
    seen = facts(with_class(tiny_model(width=16, vocab=16), "head", own))
    assert check(Config(precision=TE), seen) == ()
    made = kinds(Config(precision=TE), seen)
    assert "ConvertTransformerEngine" not in made
    assert "AutocastFP8Forward" in made
    assert said("fp8.already-converted", Config(precision=AO), seen) == [
        "Already a float8 `Linear` of transformer_engine."
    ]


def test_ms_amp_starts_where_the_model_lives_and_before_ddp() -> None:
    cfg = Config(engine=DDP(), precision=FP8(backend=MSAMP()))
    made = planned(cfg, facts(world=2))
    names = [type(one.step).__name__ for one in made.steps]
    assert names[2:] == ["MoveModel", "InitializeMSAMP", "AutocastForward", "WrapDDP"]
    (step,) = [one.step for one in made.steps if isinstance(one.step, InitializeMSAMP)]
    assert step == InitializeMSAMP(opt_level="O2", linears=(*FOUR, "head"), kept=(), reduced=True)
    alone = planned(evolve(cfg, engine=Single()), facts())
    assert not next(one.step.reduced for one in alone.steps if isinstance(one.step, InitializeMSAMP))


@pytest.mark.parametrize("engine", [Single(), DDP()], ids=["single", "ddp"])
def test_a_model_for_inference_computes_in_float8_and_is_not_wrapped(engine: Single | DDP) -> None:
    backend = TransformerEngine(autocast_during_eval=True)
    cfg = Config(engine=engine, precision=FP8(backend=backend), compile=CompileModel(), intent=Intent.INFERENCE)
    found = kinds(cfg, evolve(facts(world=1 if isinstance(engine, Single) else 2), optimizer=None))
    assert [kind for kind in found if kind not in ("StartProcessGroup", "Agree")] == [
        "ConvertTransformerEngine",
        "MoveModel",
        "AutocastForward",
        "AutocastFP8Forward",
        "CompileModules",
    ]


def test_recipes_name_only_what_the_library_is_asked_for() -> None:
    (step,) = [
        one.step for one in planned(Config(precision=TE), facts()).steps if isinstance(one.step, AutocastFP8Forward)
    ]
    assert (step.interval, step.override_linear_precision) == (None, None)
    assert (step.amax_history_len, step.amax_compute_algo, step.during_eval) == (1024, "max", False)


def test_fp8_stores_and_reduces_as_bf16_does() -> None:
    seen = facts(tiny_model(width=16, vocab=16, dtype="bfloat16"), world=2)
    made = planned(Config(engine=FSDP2(), precision=AO), seen)
    assert {one.dtype for one in made.layout} == {"float32"}
    assert made.owners.master_weights == "the parameters themselves, stored in float32"
    (shard,) = [one.step for one in made.steps if type(one.step).__name__ == "ShardUnits"]
    assert (shard.param_dtype, shard.reduce_dtype, shard.units[-1].output_dtype) == ("bfloat16", "float32", "float32")


# --- rules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "old"), [("0.6.0", True), ("0.5.9", True), ("0.6.1", False), ("0.18.0+cpu", False), ("1.0", False)]
)
def test_torchao_is_old_below_0_6_1(version: str, old: bool) -> None:
    assert bool(said("fp8.library-too-old", Config(precision=AO), facts(libraries=(("torchao", version),)))) is old


def test_a_declared_cluster_may_leave_its_libraries_unsaid() -> None:
    silent = evolve(facts(), env=Env.declare(world_size=1))
    assert said("fp8.library-missing", Config(precision=TE), silent) == []
    told = evolve(facts(), env=Env.declare(world_size=1, libraries=(("torchao", "0.18.0"),)))
    assert "libraries" in told.env.assumed
    assert said("fp8.library-missing", Config(precision=TE), told) == [
        "TransformerEngine needs `transformer_engine`, which is not installed."
    ]
    assert said("fp8.library-missing", Config(precision=AO), told) == []


@pytest.mark.parametrize(
    ("device", "capability", "backend", "wrong"),
    [
        ("cuda", (8, 9), TorchAO(), ""),
        ("cuda", None, TorchAO(), ""),
        ("cuda", (8, 6), TorchAO(), "compute capability 8.6; float8 needs 8.9"),
        ("cuda", (8, 6), TorchAO(emulate=True), ""),
        ("cuda", (8, 0), TransformerEngine(), "compute capability 8.0; float8 needs 8.9"),
        ("cpu", None, TorchAO(), "on CUDA devices, and the device is cpu"),
        ("cpu", None, TorchAO(emulate=True), ""),
        ("cpu", None, MSAMP(), "on CUDA devices, and the device is cpu"),
        ("mps", None, TorchAO(), "on CUDA devices, and the device is mps"),
    ],
)
def test_float8_needs_its_device_or_is_emulated(
    device: str, capability: tuple[int, int] | None, backend: Any, wrong: str
) -> None:
    found = said(
        "fp8.unsupported-device", Config(precision=FP8(backend=backend)), facts(device=device, capability=capability)
    )
    assert bool(found) is bool(wrong)
    assert wrong in "".join(found)


def test_xla_is_no_device_for_float8_even_emulated() -> None:
    cfg = Config(engine=XLA(), precision=FP8(backend=TorchAO(emulate=True)))
    assert said("fp8.engine", cfg, facts()) == ["TorchAO does not compute in float8 under XLA."]
    assert said("fp8.unsupported-device", cfg, facts()) == []


def test_nothing_to_convert_says_why() -> None:
    one = facts(tiny_model(width=16, vocab=16, blocks=0))
    assert said("fp8.nothing-to-convert", Config(precision=AO), one) == [
        "Of the model's 1 Linear each is the first, the last, skipped, tied."
    ]
    odd = facts(resized(tiny_model(width=16, vocab=16, blocks=1), layers__0__mlp__weight=(60, 16)))
    assert said("fp8.nothing-to-convert", Config(precision=AO), odd) == [
        "Of the model's 3 Linears each is the first, the last, skipped, tied, or of odd size (`layers.0.mlp 60 x 16`)."
    ]
    bare = facts(evolve(tiny_model(), modules=tiny_model().modules[:2], params=tiny_model().params[:1]))
    assert said("fp8.nothing-to-convert", Config(precision=AO), bare) == [
        "The model has no plain torch.nn.Linear that could compute in float8."
    ]


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, ""),
        ({"name": "SGD"}, "and `SGD` is given"),
        ({"module": "bitsandbytes.optim.adamw"}, "and `AdamW` is given"),
        ({"stateful": ("head.weight",)}, "the state of 1 parameter would be lost"),
    ],
)
def test_ms_amp_takes_a_fresh_adam(changes: dict[str, Any], wrong: str) -> None:
    seen = facts()
    assert seen.optimizer is not None
    held = evolve(seen, optimizer=evolve(seen.optimizer, **changes))
    found = said("fp8.msamp-optimizer", Config(precision=FP8(backend=MSAMP())), held)
    assert bool(found) is bool(wrong)
    assert wrong in "".join(found)


@pytest.mark.parametrize(
    ("value", "precision", "warned"),
    [
        ("AO", AO, False),
        ("ao", AO, False),
        ("TE", AO, True),
        ("NO", AO, False),
        ("MSAMP", FP8(backend=MSAMP()), False),
        ("bogus", AO, True),
    ],
)
def test_a_launcher_flag_is_compared_in_any_case(value: str, precision: FP8, warned: bool) -> None:
    seen = facts(variables=(("ACCELERATE_FP8_BACKEND", value),))
    assert bool(said("fp8.launcher-flag", Config(precision=precision), seen)) is warned


# --- XLA -----------------------------------------------------------------------------------------------------------


def test_xla_follows_by_name_and_reduces_only_among_several() -> None:
    cfg = Config(engine=XLA(), loaders=KeepLoaders(), checkpointing=CheckpointBlocks())
    assert kinds(cfg, facts(world=4)) == ("MoveToXLA", "CheckpointModules", "RebindOptimizer", "ReduceXLAGradients")
    assert kinds(cfg, facts()) == ("MoveToXLA", "CheckpointModules", "RebindOptimizer")
    created = evolve(cfg, optimizer=SGD())
    assert kinds(created, evolve(facts(world=4), optimizer=None))[-2:] == ("CreateOptimizer", "ReduceXLAGradients")


def test_xla_has_no_mesh_and_keeps_parameters_whole() -> None:
    made = planned(Config(engine=XLA(), loaders=KeepLoaders()), facts(world=4))
    assert [(axis.name, axis.size) for axis in made.mesh] == [("replicate", 4)]
    assert {one.cls for one in made.layout} == {"Parameter"}
    assert said("xla.mesh", Config(engine=XLA(), mesh=Mesh(replicate=4, shard=1)), facts(world=4)) != []


def test_xla_is_the_device_of_its_autocast() -> None:
    from prepkit.config import BF16

    made = planned(Config(engine=XLA(), precision=BF16(), loaders=KeepLoaders()), facts(device="cpu", capability=None))
    assert [one.step.device for one in made.steps if type(one.step).__name__ == "AutocastForward"] == ["xla"]
