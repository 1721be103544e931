# ruff: noqa: FBT003  # the last column of a row is the value in the plan, whatever its type
"""A config that asks for each setting, and the place in the plan where the setting has to arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from attrs import evolve

from prepkit.config import (
    BF16,
    DDP,
    FP8,
    FP16,
    FSDP1,
    FSDP2,
    MSAMP,
    SGD,
    XLA,
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    BroadcastWeights,
    CheckpointBlocks,
    ClipNorm,
    ClipValue,
    CompileBlocks,
    CompileModel,
    CompileOption,
    CompressHook,
    Config,
    DeepSpeed,
    DelayedScaling,
    EachLoader,
    InitWeights,
    Intent,
    KeepLoaders,
    LoadWeights,
    Mesh,
    Muon,
    MXFP8BlockScaling,
    OffloadToCPU,
    PowerSGDHook,
    RMSprop,
    Schedule,
    ShardLoaders,
    TensorParallel,
    TorchAO,
    TPLayer,
    TPPlan,
    TransformerEngine,
    WrapClasses,
    WrapPaths,
    WrapRoot,
    WrapSize,
)
from prepkit.config.optimizer import Group
from prepkit.facts import Facts, ParamFact, SchedulerFacts
from prepkit.testing import tiny_facts, tiny_loader, tiny_model
from prepkit.testing.tiny import LIBRARIES, tiny_checkpoint, with_batchnorm
from tests.support.dropped_setting import Setting

# --- the facts that settings are tried on ---

SCORES = tiny_facts(evolve(tiny_model(), methods=("score",)), world=2)
SPREAD = tiny_facts(evolve(tiny_model(), device_map=(("embed", "cuda:0"), ("head", "cuda:1"))), world=2, device="cuda")
STORED = tiny_checkpoint(tiny_model(), path="files")
LOADED = evolve(tiny_facts(world=2), checkpoint=STORED)
PREFIX = (("^old[.]", ""),)
OLD = evolve(STORED, rename=PREFIX, tensors=tuple(evolve(one, key=f"old.{one.key}") for one in STORED.tensors))
RENAMED = evolve(LOADED, checkpoint=OLD)
SCHEDULED = evolve(tiny_facts(), scheduler=SchedulerFacts(name="OneCycleLR", drives_optimizer=True, horizon=5))
ALONE = tiny_facts(loader=tiny_loader())
PAIR = tiny_facts(world=2, loader=tiny_loader())
FOUR = tiny_facts(world=4, loader=tiny_loader())
GPUS = tiny_facts(world=2, device="cuda", loader=tiny_loader())
LOW = tiny_facts(tiny_model(dtype="bfloat16"), world=2, device="cuda", loader=tiny_loader())
BARE = tiny_facts(world=2, optimizer=False, loader=tiny_loader())
NORMS = tiny_facts(with_batchnorm(tiny_model()), world=2, device="cuda")
STILL = tiny_facts(tiny_model(frozen=("head.weight",)), world=2)
XLAS = tiny_facts(world=2, device="xla")
WIDE = tiny_facts(
    tiny_model(width=16, vocab=32, extra=(ParamFact(name="norm.bias", shape=(16,), dtype="float32"),)),
    world=2,
    device="cuda",
)
FLOAT8 = evolve(WIDE, env=evolve(WIDE.env, capability=(10, 0), bf16=True, libraries=LIBRARIES))
XLAS = evolve(XLAS, env=evolve(XLAS.env, libraries=LIBRARIES))
LOW8 = evolve(FLOAT8, model=tiny_model(width=16, vocab=32, dtype="bfloat16"))
ZERO = evolve(GPUS, env=evolve(GPUS.env, libraries=LIBRARIES))
"""Two ranks of DeepSpeed."""


# --- the table ---


def alike(kind: type, asked: Callable[[Any], Config], facts: Facts, step: str, **values: object) -> Iterator[Setting]:
    """Settings that a step has under the same name and with the same value."""
    for name, value in values.items():
        yield Setting(f"{kind.__name__}.{name}", asked(kind(**{name: value})), facts, f"{step}.{name}", value)


def engine(value: Any) -> Config:
    """A config for the engine."""
    return Config(engine=value)


def hook(value: Any) -> Config:
    """DDP with the hook."""
    return Config(engine=DDP(hook=value))


def fp8(value: Any) -> Config:
    """DDP in float8."""
    return Config(engine=DDP(), precision=FP8(backend=value))


def te(recipe: Any) -> Config:
    """TransformerEngine with the recipe."""
    return fp8(TransformerEngine(recipe=recipe))


def load(path: str, rename: tuple[tuple[str, str], ...] = ()) -> Config:
    """Two replicas that load files."""
    return Config(engine=DDP(), weights=LoadWeights(path, rename=rename))


def loaders(value: Any) -> Config:
    """DDP with the loaders."""
    return Config(engine=DDP(), loaders=value)


def compiled(value: Any) -> Config:
    """One process that compiles."""
    return Config(compile=value)


def optimizer(spec: type, **values: object) -> Iterator[Setting]:
    """Options of a created optimizer."""
    for name, value in values.items():
        asked = Config(engine=DDP(), optimizer=(spec(names=("layers.*",), **{name: value}), SGD()))
        yield Setting(f"{spec.__name__}.{name}", asked, BARE, f"CreateOptimizer.options.{name}", value)
    named = Config(engine=DDP(), optimizer=(spec(names=("layers.*",)), SGD()))
    blocks = tuple(param.name for param in BARE.model.params if param.name.startswith("layers."))
    yield Setting(f"{spec.__name__}.names", named, BARE, "CreateOptimizer.names", blocks)
    grouped = Config(engine=DDP(), optimizer=(spec(names=("layers.*",), groups=GROUPS), SGD()))
    yield Setting(f"{spec.__name__}.groups", grouped, BARE, "CreateOptimizer.groups.0.names", blocks)


GROUPS = (Group(names=("layers.*",), weight_decay=0.5),)


def group(**values: object) -> Iterator[Setting]:
    """Options of a group of an optimizer."""
    for name, value in values.items():
        spec = SGD if name == "momentum" else AdamW
        asked = Config(engine=DDP(), optimizer=spec(groups=(Group(names=("layers.*",), **{name: value}),)))
        yield Setting(f"Group.{name}", asked, BARE, f"CreateOptimizer.groups.0.options.{name}", value)


def precision(kind: type, facts: Facts) -> Iterator[Setting]:
    """What all precisions have in common, under FSDP2."""

    def under(value: Any) -> Config:
        return Config(engine=FSDP2(), precision=value)

    name = kind.__name__
    low = "float16" if kind is FP16 else "bfloat16"
    yield Setting(f"{name}.reduce_dtype", under(kind(reduce_dtype=low)), facts, "ShardUnits.reduce_dtype", low)
    output = "ShardUnits.units.2.output_dtype"
    yield Setting(f"{name}.output_dtype", under(kind(output_dtype=low)), facts, output, low)


WRAP = WrapPaths(("layers.0",))
PATH = ("layers.0",)
OPTION = (CompileOption(name="max_autotune", value=True),)
COLWISE = TPPlan((TPLayer("layers.*.attn", "colwise", "sequence", "replicate"),))

SHOWN = frozenset({"Config.origins", *(f"Origin.{name}" for name in ("setting", "key", "source", "line", "column"))})
"""What is shown with a plan and decides nothing in it."""

SETTINGS: tuple[Setting, ...] = (
    Setting("Config.engine", engine(DDP()), PAIR, "WrapDDP.static_graph", False),
    # --- DDP ---
    *alike(
        *(DDP, engine, PAIR, "WrapDDP"),
        broadcast_buffers=False,
        bucket_cap_mb=5.0,
        find_unused_parameters=True,
        gradient_as_bucket_view=False,
        static_graph=True,
    ),
    Setting("DDP.hook", hook(CompressHook(dtype="float16")), PAIR, "WrapDDP.hook.hook", "fp16_compress_hook"),
    Setting("DDP.sync_batchnorm", engine(DDP(sync_batchnorm=True)), NORMS, "ConvertSyncBatchNorm.paths", ("norm",)),
    Setting("CompressHook.dtype", hook(CompressHook(dtype="float16")), GPUS, "WrapDDP.hook.hook", "fp16_compress_hook"),
    *alike(
        *(PowerSGDHook, hook, PAIR, "WrapDDP.hook.options"),
        min_compression_rate=3.0,
        use_error_feedback=False,
        warm_start=False,
        orthogonalization_epsilon=1e-8,
        random_seed=7,
        batch_tensors_with_same_shape=True,
    ),
    Setting("PowerSGDHook.rank", hook(PowerSGDHook(rank=4)), PAIR, "WrapDDP.hook.options.matrix_approximation_rank", 4),
    Setting(
        *("PowerSGDHook.start_iter", hook(PowerSGDHook(start_iter=10)), PAIR),
        *("WrapDDP.hook.options.start_powerSGD_iter", 10),
    ),
    Setting(
        *("PowerSGDHook.wrapper", hook(PowerSGDHook(wrapper="float16")), PAIR),
        *("WrapDDP.hook.wrapper", "fp16_compress_wrapper"),
    ),
    # --- FSDP2 ---
    Setting("FSDP2.wrap", engine(FSDP2(wrap=WrapPaths(("head",)))), PAIR, "ShardUnits.units.0.path", "head"),
    Setting("FSDP2.wrap", engine(FSDP2(wrap=WrapRoot())), PAIR, "ShardUnits.units.0.path", ""),
    Setting(
        *("FSDP2.reshard_after_forward", engine(FSDP2(reshard_after_forward=2)), FOUR),
        *("ShardUnits.units.0.reshard_after_forward", 2),
    ),
    Setting("FSDP2.offload", engine(FSDP2(offload=OffloadToCPU())), GPUS, "ShardUnits.offload", True),
    Setting(
        *("OffloadToCPU.pin_memory", engine(FSDP2(offload=OffloadToCPU(pin_memory=False))), GPUS),
        *("ShardUnits.pin_memory", False),
    ),
    Setting("FSDP2.ignored", engine(FSDP2(ignored=("head",))), PAIR, "ShardUnits.ignored", ("head.weight",)),
    *alike(FSDP2, engine, PAIR, "ShardUnits", cast_forward_inputs=False, reduce_unused=True),
    # --- selections ---
    Setting(
        *("WrapClasses.names", engine(FSDP2(wrap=WrapClasses(("Block",)))), PAIR),
        *("ShardUnits.units.1.path", "layers.1"),
    ),
    Setting(
        *("WrapClasses.paths", engine(FSDP2(wrap=WrapClasses(("Block",), paths=("head",)))), PAIR),
        *("ShardUnits.units.2.path", "head"),
    ),
    Setting("WrapPaths.patterns", engine(FSDP2(wrap=WRAP)), PAIR, "ShardUnits.units.0.path", "layers.0"),
    Setting("WrapSize.min_params", engine(FSDP2(wrap=WrapSize(80))), PAIR, "ShardUnits.units.0.path", "layers.0"),
    # --- FSDP1 ---
    Setting("FSDP1.wrap", engine(FSDP1(wrap=WRAP)), PAIR, "WrapFSDP1.units.1.path", ""),
    *alike(
        *(FSDP1, engine, GPUS, "WrapFSDP1"),
        sharding="SHARD_GRAD_OP",
        offload=True,
        backward_prefetch=None,
        forward_prefetch=True,
        limit_all_gathers=False,
        use_orig_params=False,
        sync_module_states=True,
        cast_forward_inputs=True,
        cast_root_forward_inputs=False,
    ),
    Setting("FSDP1.ignored", engine(FSDP1(ignored=("head",))), STILL, "WrapFSDP1.ignored", ("head",)),
    Setting(
        *("FSDP1.buffer_dtype", Config(engine=FSDP1(buffer_dtype="bfloat16"), precision=BF16()), LOW),
        *("WrapFSDP1.buffer_dtype", "bfloat16"),
    ),
    # --- XLA ---
    *alike(XLA, engine, XLAS, "MoveToXLA", forked=True),
    # --- DeepSpeed ---
    Setting("DeepSpeed.stage", engine(DeepSpeed(stage=3)), ZERO, "InitializeDeepSpeed.stage", 3),
    Setting(
        *("DeepSpeed.offload_optimizer", engine(DeepSpeed(offload_optimizer="cpu")), ZERO),
        *("InitializeDeepSpeed.settings.zero_optimization/offload_optimizer/device", '"cpu"'),
    ),
    Setting(
        *("DeepSpeed.offload_param", engine(DeepSpeed(stage=3, offload_param="cpu")), ZERO),
        *("InitializeDeepSpeed.settings.zero_optimization/offload_param/device", '"cpu"'),
    ),
    Setting(
        *("DeepSpeed.micro_batch", engine(DeepSpeed(micro_batch=2)), evolve(ZERO, loaders=())),
        *("InitializeDeepSpeed.settings.train_micro_batch_size_per_gpu", "2"),
    ),
    Setting(
        *("DeepSpeed.micro_batch_of", engine(DeepSpeed(micro_batch_of="largest"))),
        evolve(ZERO, loaders=(tiny_loader(), tiny_loader(batch_size=8))),
        *("InitializeDeepSpeed.settings.train_micro_batch_size_per_gpu", "8"),
    ),
    Setting(
        *("DeepSpeed.leaf_modules", engine(DeepSpeed(stage=3, leaf_modules=("Block",))), ZERO),
        *("MarkLeafModules.paths", ("layers.0", "layers.1")),
    ),
    Setting(
        *("DeepSpeed.config", engine(DeepSpeed(stage=2, config={"steps_per_print": 7})), ZERO),
        *("InitializeDeepSpeed.settings.steps_per_print", "7"),
    ),
    *(
        Setting(
            name,
            Config(
                engine=DeepSpeed(
                    stage=2,
                    schedule=Schedule(**{"warmup_steps": 1, "total_steps": 9, name.partition(".")[2]: value}),  # type: ignore[arg-type]
                    config={
                        "scheduler": {
                            "type": "WarmupDecayLR",
                            "params": dict.fromkeys(
                                ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
                            ),
                        }
                    },
                )
            ),
            ZERO,
            f"InitializeDeepSpeed.settings.scheduler/params/{key}",
            str(value),
        )
        for name, key, value in (
            ("Schedule.warmup_steps", "warmup_num_steps", 3),
            ("Schedule.total_steps", "total_num_steps", 11),
            ("Schedule.min_lr", "warmup_min_lr", 0.25),
            ("Schedule.max_lr", "warmup_max_lr", 0.5),
        )
    ),
    Setting(
        "DeepSpeed.schedule",
        engine(
            DeepSpeed(
                stage=2,
                schedule=Schedule(warmup_steps=3),
                config={"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
            )
        ),
        *(ZERO, "InitializeDeepSpeed.settings.scheduler/params/warmup_num_steps", "3"),
    ),
    # --- mesh and tensor parallelism ---
    Setting("Config.mesh", Config(engine=FSDP2(), mesh=Mesh(replicate=2, shard=2)), FOUR, "BuildMesh.axes.1.size", 2),
    Setting("Mesh.replicate", Config(engine=FSDP2(), mesh=Mesh(replicate=2)), FOUR, "BuildMesh.axes.0.size", 2),
    Setting("Mesh.shard", Config(engine=FSDP2(), mesh=Mesh(replicate=-1, shard=2)), FOUR, "BuildMesh.axes.1.size", 2),
    Setting(
        *("Mesh.tensor", Config(engine=FSDP2(), mesh=Mesh(tensor=2), tp_plan=COLWISE), FOUR),
        *("BuildMesh.axes.1.size", 2),
    ),
    *(
        Setting(
            name, Config(engine=TensorParallel(), tp_plan=COLWISE), PAIR, f"ParallelizeModules.styles.0.{at}", value
        )
        for name, at, value in (
            ("Config.tp_plan", "paths", ("layers.0.attn", "layers.1.attn")),
            ("TPPlan.layers", "paths", ("layers.0.attn", "layers.1.attn")),
            ("TPLayer.pattern", "paths", ("layers.0.attn", "layers.1.attn")),
            ("TPLayer.style", "style", "colwise"),
            ("TPLayer.input_layout", "input_layout", "sequence"),
            ("TPLayer.output_layout", "output_layout", "replicate"),
        )
    ),
    # --- precision ---
    *precision(BF16, LOW),
    *precision(FP16, GPUS),
    *precision(FP8, FLOAT8),
    Setting("Config.precision", Config(engine=FSDP2(), precision=BF16()), LOW, "ShardUnits.param_dtype", "bfloat16"),
    *alike(
        *(FP16, lambda value: Config(engine=DDP(), precision=value), GPUS, "CreateGradScaler"),
        init_scale=128.0,
        growth_factor=3.0,
        backoff_factor=0.25,
        growth_interval=5,
    ),
    *(
        Setting(
            f"{kind.__name__}.master_weights",
            Config(engine=FSDP2(), precision=kind(master_weights=False), overrides=("precision.no-master-weights",)),
            facts,
            "layout.0.dtype",
            dtype,
        )
        for kind, facts, dtype in ((BF16, LOW, "bfloat16"), (FP16, LOW, "bfloat16"), (FP8, LOW8, "bfloat16"))
    ),
    # --- float8 ---
    Setting("FP8.backend", fp8(TransformerEngine()), FLOAT8, "ConvertTransformerEngine.norms", ("norm",)),
    *alike(TorchAO, fp8, FLOAT8, "ConvertFP8Linears", recipe="rowwise", pad_inner_dim=False, emulate=True),
    Setting(
        "TorchAO.float8_all_gather",
        Config(engine=FSDP2(), precision=FP8(backend=TorchAO(float8_all_gather=False))),
        *(FLOAT8, "ConvertFP8Linears.all_gather", False),
    ),
    Setting(
        "TorchAO.precompute_scales",
        Config(engine=FSDP2(), precision=FP8(backend=TorchAO(precompute_scales=False))),
        *(FLOAT8, "kinds"),
        (
            *("StartProcessGroup", "Agree", "BuildMesh", "ReleaseOptimizer", "ConvertFP8Linears", "ShardUnits"),
            "RebindOptimizer",
        ),
    ),
    Setting(
        *("TorchAO.keep_first_and_last", fp8(TorchAO(keep_first_and_last=False)), FLOAT8),
        *("ConvertFP8Linears.paths.0", "layers.0.attn"),
    ),
    Setting(
        *("TorchAO.skip", fp8(TorchAO(skip=("layers.0.mlp",))), FLOAT8),
        *("ConvertFP8Linears.paths.0", "layers.1.attn"),
    ),
    *alike(
        *(DelayedScaling, te, FLOAT8, "AutocastFP8Forward"),
        margin=2,
        fp8_format="E4M3",
        interval=2,
        override_linear_precision=(True, False, False),
        amax_history_len=16,
        amax_compute_algo="most_recent",
    ),
    *alike(MXFP8BlockScaling, te, FLOAT8, "AutocastFP8Forward", margin=2, fp8_format="HYBRID"),
    Setting(
        *("TransformerEngine.recipe", te(MXFP8BlockScaling()), FLOAT8),
        *("AutocastFP8Forward.recipe", "MXFP8BlockScaling"),
    ),
    Setting(
        *("TransformerEngine.autocast_during_eval", fp8(TransformerEngine(autocast_during_eval=True)), FLOAT8),
        *("AutocastFP8Forward.during_eval", True),
    ),
    Setting(
        *("TransformerEngine.convert_norms", fp8(TransformerEngine(convert_norms=False)), FLOAT8),
        *("ConvertTransformerEngine.norms", ()),
    ),
    Setting(
        *("TransformerEngine.skip", fp8(TransformerEngine(skip=("norm",))), FLOAT8),
        *("ConvertTransformerEngine.norms", ()),
    ),
    *alike(MSAMP, fp8, FLOAT8, "InitializeMSAMP", opt_level="O1"),
    # --- compilation and checkpointing ---
    *(
        setting
        for kind in (CompileModel, CompileBlocks)
        for setting in (
            *alike(
                *(kind, compiled, ALONE, "CompileModules"),
                backend="eager",
                mode="max-autotune",
                fullgraph=True,
                dynamic=True,
                recompile_limit=3,
                isolate_recompiles=True,
            ),
            Setting(
                f"{kind.__name__}.options",
                *(compiled(kind(options=OPTION)), ALONE, "CompileModules.options.max_autotune", True),
            ),
        )
    ),
    Setting("Config.compile", compiled(CompileModel()), ALONE, "CompileModules.paths", ("",)),
    Setting("CompileBlocks.blocks", compiled(CompileBlocks(blocks=WRAP)), ALONE, "CompileModules.paths", PATH),
    Setting(
        "CompileOption.name", compiled(CompileModel(options=OPTION)), ALONE, "CompileModules.options.max_autotune", True
    ),
    Setting(
        "CompileOption.value",
        compiled(CompileModel(options=OPTION)),
        ALONE,
        "CompileModules.options.max_autotune",
        True,
    ),
    Setting(
        "Config.checkpointing", Config(checkpointing=CheckpointBlocks()), ALONE, "CheckpointModules.offload", False
    ),
    Setting(
        *("CheckpointBlocks.blocks", Config(checkpointing=CheckpointBlocks(blocks=WRAP)), ALONE),
        *("CheckpointModules.paths", PATH),
    ),
    Setting(
        *("CheckpointBlocks.every", Config(checkpointing=CheckpointBlocks(every=2)), ALONE),
        *("CheckpointModules.paths", ("layers.1",)),
    ),
    *alike(
        *(CheckpointBlocks, lambda value: Config(engine=DDP(), checkpointing=value), GPUS, "CheckpointModules"),
        preserve_rng_state=False,
        keep_ops=("aten.mm",),
        offload=True,
    ),
    # --- weights, placement and the process group ---
    Setting("Config.weights", Config(engine=FSDP2(), weights=BroadcastWeights()), PAIR, "SendTensors.axes.0.size", 2),
    Setting("LoadWeights.path", load("files"), LOADED, "ReadTensors.sources.0.key", "embed.weight"),
    Setting("LoadWeights.rename", load("files", PREFIX), RENAMED, "ReadTensors.sources.0.name", "embed.weight"),
    Setting("InitWeights.seed", Config(engine=FSDP2(), weights=InitWeights(7)), PAIR, "InitializeTensors.seed", 7),
    Setting("Config.intent", Config(engine=DDP(), intent=Intent.INFERENCE), BARE, "WrapLoader.ends_window", False),
    Setting("Config.device", Config(device="cpu"), tiny_facts(device="cuda"), "MoveModel.device.type", "cpu"),
    Setting("Config.backend", Config(engine=DDP(), backend="gloo"), GPUS, "StartProcessGroup.backend", "gloo"),
    Setting("Config.timeout_s", Config(engine=DDP(), timeout_s=7.0), PAIR, "StartProcessGroup.timeout_s", 7.0),
    Setting(
        "Config.entry_points",
        Config(engine=DDP(), entry_points=("score",)),
        SCORES,
        "RegisterEntryPoints.names",
        ("score",),
    ),
    Setting("Config.keep_device_map", Config(engine=DDP(), keep_device_map=True), SPREAD, "WrapDDP.device", None),
    # --- the loop ---
    Setting("Config.total_steps", Config(total_steps=10), SCHEDULED, "refused by", ("scheduler.runs-out",)),
    Setting(
        *("Config.overrides", Config(overrides=("mesh.single-many-ranks",)), PAIR, "overridden"),
        ("mesh.single-many-ranks",),
    ),
    Setting("Config.accumulation", Config(accumulation=3), ALONE, "owners.accumulation_steps", 3),
    Setting("Config.average_each", Config(engine=DDP(), average_each=True), PAIR, "run.average_each", True),
    Setting("Config.global_batch", Config(global_batch=12), ALONE, "owners.accumulation_steps", 3),
    Setting("Config.clip", Config(clip=ClipNorm(0.5)), ALONE, "owners.clip.max_norm", 0.5),
    Setting("ClipNorm.max_norm", Config(clip=ClipNorm(0.5)), ALONE, "owners.clip.max_norm", 0.5),
    Setting("ClipNorm.norm_type", Config(clip=ClipNorm(0.5, 1.0)), ALONE, "owners.clip.norm_type", 1.0),
    Setting("ClipValue.max_value", Config(clip=ClipValue(0.5)), ALONE, "owners.clip.max_value", 0.5),
    Setting("Config.scheduler_ticks", Config(scheduler_ticks=3), ALONE, "owners.scheduler_ticks", 3),
    # --- loaders ---
    Setting("Config.loaders", loaders(ShardLoaders(seed=7)), PAIR, "ShardLoader.seed", 7),
    *alike(ShardLoaders, loaders, PAIR, "ShardLoader", seed=7, drop_last=True, dispatch=True),
    Setting("ShardLoaders.whole_batches", loaders(ShardLoaders(whole_batches=True)), PAIR, "ShardLoader.fill", True),
    Setting("ShardLoaders.draws", loaders(ShardLoaders(draws="sampler")), PAIR, "ShardLoader.seed", None),
    Setting("ShardLoaders.split_batches", loaders(ShardLoaders(split_batches=True)), PAIR, "ShardLoader.batch_size", 2),
    *(
        Setting(f"{kind.__name__}.{name}", loaders(kind(**{name: value})), PAIR, f"WrapLoader.{at}", seen)
        for kind in (ShardLoaders, KeepLoaders)
        for name, value, at, seen in (
            ("purpose", "evaluation", "evaluation", True),
            ("to_device", False, "device", None),
            ("ends_window", False, "ends_window", False),
        )
    ),
    Setting("EachLoader.choices", loaders(EachLoader((ShardLoaders(seed=7),))), PAIR, "ShardLoader.seed", 7),
    # --- optimizers ---
    Setting("Config.optimizer", Config(engine=DDP(), optimizer=SGD()), BARE, "CreateOptimizer.algorithm", "SGD"),
    *optimizer(AdamW, lr=0.5, betas=(0.5, 0.6), eps=0.25, weight_decay=0.5),
    *optimizer(Adam, lr=0.5, betas=(0.5, 0.6), eps=0.25, weight_decay=0.5, amsgrad=True),
    *optimizer(SGD, lr=0.5, momentum=0.5, weight_decay=0.5),
    Setting(
        *("SGD.nesterov", Config(engine=DDP(), optimizer=SGD(momentum=0.5, nesterov=True)), BARE),
        *("CreateOptimizer.options.nesterov", True),
    ),
    *optimizer(RMSprop, lr=0.5, alpha=0.5, eps=0.25, weight_decay=0.5, momentum=0.5, centered=True),
    *optimizer(Adagrad, lr=0.5, lr_decay=0.5, weight_decay=0.5, eps=0.25),
    *optimizer(Adafactor, lr=0.5, beta2_decay=-0.5, d=2.0, weight_decay=0.5),
    *optimizer(Muon, lr=0.5, weight_decay=0.5, momentum=0.5, nesterov=False, adjust_lr_fn="match_rms_adamw"),
    *group(lr=0.5, weight_decay=0.5, betas=(0.5, 0.6), momentum=0.5),
    Setting(
        "Group.names",
        Config(engine=DDP(), optimizer=AdamW(groups=(Group(names=("head.*",), lr=0.5),))),
        *(BARE, "CreateOptimizer.groups.0.names", ("head.weight",)),
    ),
)
