"""Small models and environments to try rules on, and for every rule one pair on which it fires."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
    AdamW,
    CheckpointBlocks,
    ClipNorm,
    ClipValue,
    CompileBlocks,
    CompileModel,
    CompressHook,
    Config,
    DeepSpeed,
    Intent,
    KeepLoaders,
    Mesh,
    MXFP8BlockScaling,
    OffloadToCPU,
    PowerSGDHook,
    Schedule,
    ShardLoaders,
    TorchAO,
    TransformerEngine,
    WrapClasses,
    WrapPaths,
    WrapRoot,
    WrapSize,
)
from prepkit.facts import (
    ArchitectureFacts,
    BufferFact,
    ClassFact,
    Env,
    Facts,
    GroupFact,
    LoaderFacts,
    Mark,
    ModelFacts,
    ModuleFact,
    OptimizerFacts,
    ParamFact,
    SchedulerFacts,
)
from prepkit.provoke_weights import WEIGHTS

LIBRARIES = (
    *(("deepspeed", "0.19.8"), ("msamp", "0.4.0"), ("torch_xla", "2.9.0")),
    *(("torchao", "0.18.0"), ("transformer_engine", "2.9.0")),
)
"""What is installed where float8 is to be tried, with versions."""

Pair = tuple[Config, Facts]

_CLASSES = tuple(
    ClassFact(
        name=name,
        module=module,
        has_forward=name != "ModuleList",
        resets=module.startswith("torch.nn.modules.") and name != "ModuleList",
    )
    for name, module in (
        ("Tiny", "tiny"),
        ("Embedding", "torch.nn.modules.sparse"),
        ("ModuleList", "torch.nn.modules.container"),
        ("Block", "tiny"),
        ("Linear", "torch.nn.modules.linear"),
        ("LayerNorm", "torch.nn.modules.normalization"),
    )
)
_INDEX = {cls.name: index for index, cls in enumerate(_CLASSES)}


def tiny_model(
    *,
    blocks: int = 2,
    width: int = 4,
    vocab: int = 8,
    dtype: str = "float32",
    tied: bool = False,
    frozen: tuple[str, ...] = (),
    extra: tuple[ParamFact, ...] = (),
) -> ModelFacts:
    """A language model: ``embed``, ``layers.0`` … (class ``Block``, with ``attn`` and ``mlp``), ``norm``, ``head``.

    ``tied``: ``head.weight`` is ``embed.weight``. ``frozen``: names of parameters without a gradient.
    ``extra``: more parameters, in modules that exist.
    """
    tree = [("", "Tiny"), ("embed", "Embedding"), ("layers", "ModuleList")]
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (vocab, width)}
    for path in (f"layers.{index}" for index in range(blocks)):
        tree += [(path, "Block"), (f"{path}.attn", "Linear"), (f"{path}.mlp", "Linear")]
        shapes |= {f"{path}.attn.weight": (width, width), f"{path}.mlp.weight": (4 * width, width)}
    tree += [("norm", "LayerNorm"), ("head", "Linear")]
    shapes |= {"norm.weight": (width,)} | ({} if tied else {"head.weight": (vocab, width)})
    params = tuple(
        ParamFact(name=name, shape=shape, dtype=dtype, requires_grad=name not in frozen)
        for name, shape in shapes.items()
    )
    return ModelFacts(
        classes=_CLASSES,
        modules=tuple(ModuleFact(path=path, cls=_INDEX[cls]) for path, cls in tree),
        params=params + extra,
        buffers=(BufferFact(name="positions", shape=(vocab,), dtype="int64", persistent=False),),
        ties=(("embed.weight", "head.weight"),) if tied else (),
        input_embedding="embed",
        output_embedding="head",
    )


def tiny_optimizer(model: ModelFacts, name: str = "AdamW", module: str = "torch.optim.adamw") -> OptimizerFacts:
    """An optimizer that holds every trainable parameter of the model in one group."""
    slots = tuple(param.name for param in model.params if param.requires_grad)
    return OptimizerFacts(name=name, module=module, groups=(GroupFact(slots=slots, options=(("lr", 1e-3),)),))


def tiny_facts(
    model: ModelFacts | None = None,
    *,
    world: int = 1,
    device: str = "cpu",
    optimizer: bool = True,
    loader: LoaderFacts | None = None,
    variables: tuple[tuple[str, str], ...] = (),
) -> Facts:
    """Facts about ``tiny_model()``, or the model given, with an optimizer that fits it."""
    model = model or tiny_model()
    return Facts(
        model=model,
        optimizer=tiny_optimizer(model) if optimizer else None,
        loaders=(loader,) if loader else (),
        env=Env(world_size=world, device=device, torch="2.13.0", variables=variables),
    )


def tiny_loader(**changes: Any) -> LoaderFacts:
    """A shuffled loader of 64 samples in batches of 4."""
    usual = LoaderFacts(batch_size=4, length=64, sampler="random")
    return evolve(usual, **changes)


def marked(model: ModelFacts, mark: Mark, path: str = "") -> ModelFacts:
    """The model with a mark on one module."""
    modules = (evolve(m, marks=(*m.marks, mark)) if m.path == path else m for m in model.modules)
    return evolve(model, modules=tuple(modules))


def _ranks(cfg: Config, world: int = 8, **options: Any) -> Pair:
    return cfg, evolve(tiny_facts(world=world), **options)


def _env(cfg: Config, **changes: Any) -> Pair:
    facts = tiny_facts()
    return cfg, evolve(facts, env=evolve(facts.env, **changes))


def _model(cfg: Config, model: ModelFacts) -> Pair:
    return cfg, tiny_facts(model)


def _param(name: str, dtype: str = "float32", shape: tuple[int, ...] = (4,), **more: Any) -> ParamFact:
    return evolve(ParamFact(name=name, shape=shape, dtype=dtype), **more)


def _optimizer(cfg: Config, **changes: Any) -> Pair:
    facts = tiny_facts()
    assert facts.optimizer is not None
    return cfg, evolve(facts, optimizer=evolve(facts.optimizer, **changes))


def _loader(cfg: Config, **changes: Any) -> Pair:
    return cfg, tiny_facts(world=2, loader=tiny_loader(**changes))


def _healthy(make: Callable[[Facts], Pair]) -> Pair:
    return make(tiny_facts())


def _deepspeed(json: str = "{}", *, stage: int | None = 2, world: int = 2, **more: Any) -> Pair:
    """ZeRO with this JSON; ``more`` are fields of the config, of the engine (``engine_...``) or of the facts."""
    facts = tiny_facts(world=world)
    cfg = Config(engine=DeepSpeed(stage=stage, config=json, micro_batch=4))
    for name, value in more.items():
        if name.startswith("engine_"):
            assert isinstance(cfg.engine, DeepSpeed), "it was made so above"
            changed: Any = {name.removeprefix("engine_"): value}
            cfg = evolve(cfg, engine=evolve(cfg.engine, **changed))
        elif name.startswith("env_"):
            environment: Any = {name.removeprefix("env_"): value}
            facts = evolve(facts, env=evolve(facts.env, **environment))
        elif name in ("model", "optimizer", "scheduler", "loaders"):
            other: Any = {name: value}
            facts = evolve(facts, **other)
        else:
            field: Any = {"optimizer" if name == "spec" else name: value}
            cfg = evolve(cfg, **field)
    return cfg, facts


def tiny_experts() -> ModelFacts:
    """The tiny model whose blocks hold a list of experts."""
    model = tiny_model()
    return evolve(model, modules=(*model.modules, ModuleFact(path="layers.0.experts", cls=_INDEX["ModuleList"])))


def _quantised(cfg: Config, *places: str, bitsandbytes: str = "0.50.2", **changes: Any) -> Pair:
    """A 4-bit model whose map has these devices."""
    device_map = tuple((path, device) for path, device in zip(("embed", "layers"), places, strict=False))
    usual = tiny_facts(evolve(tiny_model(), quantised="4bit", device_map=device_map), device="cuda")
    return cfg, evolve(usual, env=evolve(usual.env, libraries=(("bitsandbytes", bitsandbytes),), **changes))


def with_batchnorm(model: ModelFacts) -> ModelFacts:
    """The model with a batch norm in the place of its layer norm."""
    norm = ClassFact(name="BatchNorm1d", module="torch.nn.modules.batchnorm", mro=("_BatchNorm", "_NormBase"))
    return evolve(model, classes=tuple(norm if cls.name == "LayerNorm" else cls for cls in model.classes))


def _embeddings(*, declared: bool, tied: bool) -> ModelFacts:
    said = ArchitectureFacts(tie_word_embeddings=declared)
    return evolve(tiny_model(tied=tied), architecture=said, tied_keys=("head.weight",), has_tie_weights=True)


def _fp8(cfg: Config, device: str = "cuda", world: int = 1, optimizer: bool = True, **env: Any) -> Pair:
    """The config on a model of width 16, where everything is installed, on a Blackwell unless said otherwise."""
    facts = tiny_facts(tiny_model(width=16, vocab=16), world=world, device=device, optimizer=optimizer)
    usual = {"libraries": LIBRARIES, "capability": (10, 0) if device == "cuda" else None}
    return cfg, evolve(facts, env=evolve(facts.env, **{**usual, **env}))


def _of_model(pair: Pair, **changes: Any) -> Pair:
    return pair[0], evolve(pair[1], model=evolve(pair[1].model, **changes))


def _with_loader(pair: Pair) -> Pair:
    return pair[0], evolve(pair[1], loaders=(tiny_loader(),))


_AO = Config(precision=FP8(backend=TorchAO()))
_TE = Config(precision=FP8(backend=TransformerEngine()))
_MSAMP = Config(precision=FP8(backend=MSAMP()))
_FLOAT8 = tuple(
    evolve(cls, name="Float8Linear", module="torchao.float8.float8_linear") if cls.name == "Embedding" else cls
    for cls in _CLASSES
)
_NAMES = tuple(param.name for param in tiny_model().params)
_LORA = _param("layers.0.attn.lora", "bfloat16")
_ALL = GroupFact(slots=_NAMES)
_FLAT = FSDP1(use_orig_params=False)


def _grouped(*groups: tuple[str, ...]) -> OptimizerFacts:
    return evolve(tiny_optimizer(tiny_model()), groups=tuple(GroupFact(slots=slots) for slots in groups))


PROVOKE: dict[str, Callable[[], Pair]] = {
    "environment.world-size": lambda: _env(Config(), world_size=0),
    "environment.device": lambda: _env(Config(device="cuda")),
    "environment.backend": lambda: _ranks(Config(engine=DDP(), backend="nccl")),
    "environment.offload-backend": lambda: _env(
        Config(engine=FSDP2(offload=OffloadToCPU()), backend="nccl"), device="cuda", world_size=8
    ),
    "environment.slurm-tasks": lambda: _env(Config(), variables=(("SLURM_NTASKS", "16"),)),
    "environment.torch-version": lambda: _env(Config(), torch="2.5.1+cu124"),
    "environment.launcher-flag": lambda: _env(Config(), variables=(("ACCELERATE_USE_FSDP", "true"),)),
    "mesh.size-below-one": lambda: _ranks(Config(engine=FSDP2(), mesh=Mesh(replicate=0))),
    "mesh.two-rests": lambda: _ranks(Config(engine=FSDP2(), mesh=Mesh(replicate=-1, shard=-1))),
    "mesh.not-world-size": lambda: _ranks(Config(engine=FSDP2(), mesh=Mesh(replicate=3, shard=4))),
    "mesh.single-has-none": lambda: _ranks(Config(mesh=Mesh(replicate=2)), world=1),
    "mesh.ddp-does-not-shard": lambda: _ranks(Config(engine=DDP(), mesh=Mesh(replicate=2))),
    "mesh.nothing-sharded": lambda: _ranks(Config(engine=FSDP2(), mesh=Mesh(replicate=8, shard=1))),
    "mesh.single-many-ranks": lambda: _ranks(Config()),
    "mesh.ddp-alone": lambda: _ranks(Config(engine=DDP()), world=1),
    "fsdp1.mesh": lambda: _ranks(Config(engine=FSDP1(sharding="HYBRID_SHARD"), mesh=Mesh(replicate=8, shard=1))),
    "model.already-wrapped": lambda: _model(Config(), marked(tiny_model(), "ddp")),
    "model.already-autocast": lambda: _model(Config(precision=BF16()), marked(tiny_model(), "autocast")),
    "model.already-compiled": lambda: _model(Config(compile=CompileModel()), marked(tiny_model(), "compiled")),
    "model.already-checkpointed": lambda: _model(
        Config(checkpointing=CheckpointBlocks()), marked(tiny_model(), "checkpointed", "layers.0")
    ),
    "model.sharded-parameters": lambda: _model(
        Config(engine=DDP()), tiny_model(extra=(_param("norm.bias", cls="DTensor"),))
    ),
    "model.device-map": lambda: (
        Config(engine=FSDP2()),
        tiny_facts(evolve(tiny_model(), device_map=(("embed", "cuda:0"), ("layers", "cuda:1"))), world=2),
    ),
    "model.lazy-parameters": lambda: _model(
        Config(), tiny_model(extra=(_param("head.bias", shape=(), cls="UninitializedParameter"),))
    ),
    "model.nothing-trainable": lambda: (Config(), tiny_facts(tiny_model(frozen=_NAMES), optimizer=False)),
    "quantised.spread": lambda: _quantised(
        Config(engine=DDP(), keep_device_map=True), "cuda:0", "cuda:1", world_size=2
    ),
    "quantised.other-device": lambda: _quantised(Config(), "cuda:1"),
    "quantised.on-cpu": lambda: _quantised(Config(), "cuda:0", "cpu", bitsandbytes="0.43.3"),
    "quantised.on-disk": lambda: _quantised(Config(), "disk"),
    "quantised.not-packed": lambda: _model(
        Config(), tiny_model(extra=(_param("head.packed", shape=(8, 4), cls="Params4bit", requires_grad=False),))
    ),
    "wrap.empty": lambda: _ranks(Config(engine=FSDP2(wrap=WrapClasses(("",))))),
    "wrap.class-not-found": lambda: _ranks(Config(engine=FSDP2(wrap=WrapClasses(("BertLayer",))))),
    "wrap.pattern-not-found": lambda: _ranks(Config(engine=FSDP2(wrap=WrapPaths(("model.layers.*",))))),
    "wrap.container": lambda: _ranks(Config(engine=FSDP2(wrap=WrapPaths(("layers",))))),
    "wrap.size-below-one": lambda: _ranks(Config(engine=FSDP2(wrap=WrapSize(0)))),
    "wrap.named-twice": lambda: _ranks(Config(engine=FSDP2(wrap=WrapClasses(("Block", "Block"))))),
    "blocks.none-selected": lambda: _model(Config(compile=CompileBlocks()), tiny_model(blocks=1)),
    "blocks.one-unit": lambda: _ranks(Config(engine=FSDP2(wrap=WrapRoot()))),
    "blocks.nested": lambda: _model(
        Config(checkpointing=CheckpointBlocks(blocks=WrapClasses(("Block", "Linear")))), tiny_model()
    ),
    "blocks.declared-absent": lambda: (
        Config(engine=FSDP2()),
        tiny_facts(evolve(tiny_model(), declared_blocks=("VisionLayer",)), world=2),
    ),
    "reshard.not-a-factor": lambda: _ranks(Config(engine=FSDP2(reshard_after_forward=3))),
    "ties.split": lambda: _model(Config(engine=FSDP2(wrap=WrapClasses(("Block", "Linear")))), tiny_model(tied=True)),
    "ties.only-declared": lambda: _model(Config(), _embeddings(declared=True, tied=False)),
    "ties.undeclared": lambda: _model(Config(), _embeddings(declared=False, tied=True)),
    "units.mixed-dtypes": lambda: _model(Config(engine=FSDP2()), tiny_model(extra=(_LORA,))),
    "units.scalar": lambda: _model(Config(engine=FSDP2()), tiny_model(extra=(_param("norm.scale", shape=()),))),
    "units.packed": lambda: _model(
        Config(engine=FSDP2()),
        tiny_model(extra=(_param("layers.0.mlp.packed", "uint8", requires_grad=False, cls="Params4bit"),)),
    ),
    "units.integer": lambda: _model(
        Config(engine=FSDP2()), tiny_model(extra=(_param("embed.table", "int16", requires_grad=False),))
    ),
    "units.empty": lambda: _model(Config(engine=FSDP2()), tiny_model(extra=(_param("norm.none", shape=(0, 4)),))),
    "units.mixed-requires-grad": lambda: _ranks(
        Config(engine=FSDP2()), model=tiny_model(frozen=("layers.0.attn.weight",)), optimizer=None
    ),
    "optimizer.foreign-parameters": lambda: _optimizer(Config(), groups=(GroupFact(slots=(None, None, *_NAMES)),)),
    "optimizer.held-twice": lambda: _optimizer(Config(), groups=(_ALL, GroupFact(slots=("norm.weight",)))),
    "optimizer.two": lambda: _optimizer(Config(optimizer=AdamW())),
    "optimizer.for-inference": lambda: _optimizer(Config(intent=Intent.INFERENCE)),
    "optimizer.keeps-own-list": lambda: _optimizer(Config(engine=FSDP2()), name="LBFGS", keeps_own_list=True),
    "optimizer.cannot-shard": lambda: _optimizer(
        Config(engine=FSDP2()), name="PagedAdamW8bit", module="bitsandbytes.optim.adamw"
    ),
    "scheduler.other-optimizer": lambda: _ranks(
        Config(), world=1, scheduler=SchedulerFacts(name="StepLR", drives_optimizer=False)
    ),
    "scheduler.without-optimizer": lambda: _ranks(
        Config(optimizer=SGD()), 1, optimizer=None, scheduler=SchedulerFacts(name="StepLR", drives_optimizer=False)
    ),
    "optimizer.none": lambda: _ranks(Config(), world=1, optimizer=None),
    "optimizer.misses-parameters": lambda: _optimizer(Config(), groups=(GroupFact(slots=_NAMES[1:]),)),
    "optimizer.frozen-parameters": lambda: (
        Config(),
        evolve(tiny_facts(tiny_model(frozen=_NAMES[:1])), optimizer=tiny_optimizer(tiny_model())),
    ),
    "precision.bf16-unsupported": lambda: _env(Config(precision=BF16()), device="cuda", capability=(7, 0)),
    "precision.fp16-unsupported": lambda: _env(Config(precision=FP16())),
    "precision.fp16-trains-fp16": lambda: (
        Config(precision=FP16(master_weights=False)),
        tiny_facts(tiny_model(dtype="float16"), device="cuda"),
    ),
    "precision.loss-scale": lambda: _env(Config(precision=FP16(growth_factor=1.0)), device="cuda"),
    "precision.float16": lambda: _ranks(Config(engine=FSDP2(), precision=BF16(reduce_dtype="float16"))),
    "precision.reduce-dtype-ignored": lambda: _ranks(Config(engine=DDP(), precision=BF16(reduce_dtype="bfloat16"))),
    "precision.steps-in-16-bit": lambda: _model(Config(), tiny_model(dtype="bfloat16")),
    "precision.no-master-weights": lambda: _model(
        Config(precision=BF16(master_weights=False)), tiny_model(dtype="bfloat16")
    ),
    "fp8.library-missing": lambda: _fp8(_AO, libraries=()),
    "fp8.library-too-old": lambda: _fp8(_AO, libraries=(("torchao", "0.6.0"),)),
    "fp8.unsupported-device": lambda: _fp8(_AO, capability=(8, 6)),
    "fp8.unsupported-blocks": lambda: _fp8(
        Config(precision=FP8(backend=TransformerEngine(recipe=MXFP8BlockScaling()))), capability=(9, 0)
    ),
    "fp8.recipe-on-cpu": lambda: _fp8(
        Config(precision=FP8(backend=TorchAO(recipe="rowwise_with_gw_hp", emulate=True))), device="cpu"
    ),
    "fp8.skip-not-found": lambda: _fp8(Config(precision=FP8(backend=TorchAO(skip=("model.layers.*.attn",))))),
    "fp8.nothing-to-convert": lambda: _of_model(_fp8(_AO), params=tiny_model(width=4, vocab=8).params),
    "fp8.already-converted": lambda: _of_model(_fp8(_AO), classes=_FLOAT8),
    "fp8.tensor-parallel": lambda: _of_model(_fp8(_AO), architecture=ArchitectureFacts(tp_size=2)),
    "fp8.idle-in-eval": lambda: _fp8(evolve(_TE, intent=Intent.INFERENCE), optimizer=False),
    "fp8.launcher-flag": lambda: _env(Config(), variables=(("ACCELERATE_FP8_BACKEND", "te"),)),
    "fp8.engine": lambda: _fp8(Config(engine=XLA(), precision=_AO.precision), device="cpu"),
    "fp8.all-gather": lambda: _fp8(
        Config(engine=DDP(), precision=FP8(backend=TorchAO(float8_all_gather=True))), world=2
    ),
    "fp8.msamp-engine": lambda: _fp8(evolve(_MSAMP, engine=FSDP2()), world=2),
    "fp8.msamp-optimizer": lambda: _fp8(evolve(_MSAMP, optimizer=AdamW()), optimizer=False),
    "fp8.msamp-clip": lambda: _fp8(evolve(_MSAMP, clip=ClipNorm(1.0))),
    "fp8.optimizer-missing": lambda: _fp8(_TE, optimizer=False),
    "fp8.msamp-deprecated": lambda: _fp8(_MSAMP),
    "ddp.bucket-size": lambda: _ranks(Config(engine=DDP(bucket_cap_mb=0.0))),
    "ddp.unused-in-static-graph": lambda: _ranks(Config(engine=DDP(static_graph=True, find_unused_parameters=True))),
    "ddp.reentrant-unused": lambda: _ranks(
        Config(engine=DDP(find_unused_parameters=True)), model=marked(tiny_model(), "reentrant", "layers.0")
    ),
    "ddp.hook-dtype": lambda: _ranks(Config(engine=DDP(hook=CompressHook(dtype="bfloat16")))),
    "ddp.powersgd": lambda: _ranks(Config(engine=DDP(hook=PowerSGDHook(start_iter=1)))),
    "ddp.sync-batchnorm-on-cpu": lambda: _ranks(
        Config(engine=DDP(sync_batchnorm=True)), model=with_batchnorm(tiny_model())
    ),
    "ddp.sync-batchnorm-loses": lambda: (
        Config(engine=DDP(sync_batchnorm=True)),
        tiny_facts(with_batchnorm(tiny_model(extra=(_param("norm.shift"),))), world=8, device="cuda"),
    ),
    "ddp.no-batchnorm": lambda: _ranks(Config(engine=DDP(sync_batchnorm=True))),
    "fsdp1.mixed-requires-grad": lambda: (
        Config(engine=_FLAT),
        tiny_facts(tiny_model(frozen=("layers.0.attn.weight", "layers.1.attn.weight")), world=8),
    ),
    "fsdp1.unit-in-two-groups": lambda: _ranks(
        Config(engine=_FLAT), optimizer=_grouped(_NAMES[:2] + _NAMES[3:], _NAMES[2:3])
    ),
    "fsdp1.partial-state": lambda: _ranks(
        Config(engine=_FLAT), optimizer=evolve(tiny_optimizer(tiny_model()), stateful=("layers.0.attn.weight",))
    ),
    "fsdp1.compiled-flat": lambda: _ranks(Config(engine=_FLAT, compile=CompileModel())),
    "fsdp1.shaped-optimizer": lambda: _ranks(
        Config(engine=FSDP1()), optimizer=tiny_optimizer(tiny_model(), "Muon", "torch.optim._muon")
    ),
    "fsdp1.ignored-not-found": lambda: _ranks(Config(engine=FSDP1(ignored=("layer.*", "heads")))),
    "fsdp1.ignored-trains": lambda: _ranks(Config(engine=FSDP1(ignored=("layers.*",)))),
    "fsdp1.sync-on-cpu": lambda: _ranks(Config(engine=FSDP1(sync_module_states=True))),
    "fsdp1.offload-on-cpu": lambda: _ranks(Config(engine=FSDP1(offload=True))),
    "fsdp1.buffer-dtype-ignored": lambda: _ranks(Config(engine=FSDP1(buffer_dtype="bfloat16"))),
    "fsdp1.frozen-gradients": lambda: (
        Config(engine=FSDP1()),
        tiny_facts(tiny_model(frozen=("layers.0.mlp.weight", "layers.1.mlp.weight")), world=8),
    ),
    "fsdp1.no-shard": lambda: _ranks(Config(engine=FSDP1(sharding="NO_SHARD"))),
    "xla.library-missing": lambda: _fp8(Config(engine=XLA()), device="cpu", libraries=()),
    "xla.mesh": lambda: _fp8(Config(engine=XLA(), mesh=Mesh()), device="cpu"),
    "xla.loaders": lambda: _with_loader(_fp8(Config(engine=XLA()), device="cpu", world=2)),
    "xla.clip": lambda: _fp8(Config(engine=XLA(), clip=ClipNorm(1.0)), device="cpu", world=2),
    "xla.compile": lambda: _fp8(Config(engine=XLA(), compile=CompileModel()), device="cpu"),
    "deepspeed.not-json": lambda: _deepspeed('{"zero_optimization": {'),
    "deepspeed.removed-key": lambda: _deepspeed('{"zero_optimization": {"mics_shard_size": 8}}'),
    "deepspeed.unknown-key": lambda: _deepspeed('{"gradient_clipp1ng": 1.0}'),
    "deepspeed.wrong-type": lambda: _deepspeed('{"zero_optimization": {"reduce_bucket_size": 15099494.4}}'),
    "deepspeed.no-stage": lambda: _deepspeed('{"gradient_clipping": 0.0}', stage=None),
    "deepspeed.stage": lambda: _deepspeed(stage=4),
    "deepspeed.two-places": lambda: _deepspeed('{"gradient_accumulation_steps": 10}'),
    "deepspeed.precision": lambda: _deepspeed('{"fp16": {"enabled": true}}'),
    "deepspeed.stored-16-bit": lambda: _deepspeed(model=tiny_model(dtype="bfloat16")),
    "deepspeed.master-weights": lambda: _deepspeed(precision=BF16(master_weights=False)),
    "deepspeed.loss-scale": lambda: _deepspeed(precision=FP16(init_scale=1000.0), env_device="cuda"),
    "deepspeed.clip": lambda: _deepspeed(clip=ClipValue(1.0)),
    "deepspeed.max-grad-norm": lambda: _deepspeed(
        '{"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}', optimizer=None
    ),
    "deepspeed.batch": lambda: _deepspeed(
        '{"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2}', world=7, engine_micro_batch=None
    ),
    "deepspeed.no-micro-batch": lambda: _deepspeed(engine_micro_batch=None),
    "deepspeed.hidden-size": lambda: _deepspeed('{"zero_optimization": {"reduce_bucket_size": "auto"}}'),
    "deepspeed.auto": lambda: _deepspeed('{"zero_optimization": {"stage3_max_live_parameters": "auto"}}'),
    "deepspeed.offload": lambda: _deepspeed(stage=2, engine_offload_param="cpu"),
    "deepspeed.offload-optimizer": lambda: _deepspeed(
        engine_offload_optimizer="cpu", optimizer=tiny_optimizer(tiny_model(), "SGD", "torch.optim.sgd")
    ),
    "deepspeed.tensor-parallel": lambda: _deepspeed('{"tensor_parallel": {"autotp_size": 4}}', world=6),
    "deepspeed.stage-0-16-bit": lambda: _deepspeed(stage=0, precision=BF16()),
    "deepspeed.msamp": lambda: _fp8(evolve(_MSAMP, engine=DeepSpeed(stage=3, micro_batch=4)), world=2),
    "deepspeed.installed": lambda: _deepspeed(
        '{"tensor_parallel": {"autotp_size": 2}}', env_libraries=(("deepspeed", "0.15.4"),)
    ),
    "deepspeed.accelerator": lambda: _deepspeed(device="cpu", env_device="cuda"),
    "deepspeed.hpu-lazy": lambda: _deepspeed(engine_offload_optimizer="cpu", env_device="hpu"),
    "deepspeed.mesh": lambda: _deepspeed(mesh=Mesh(replicate=2)),
    "deepspeed.tensor-parallel-loaders": lambda: _deepspeed(
        '{"tensor_parallel": {"autotp_size": 2}}', loaders=(tiny_loader(),)
    ),
    "deepspeed.zero-init": lambda: _deepspeed(model=tiny_model(extra=(_param("norm.bias", cls="ZeroParameter"),))),
    "deepspeed.leaf-modules": lambda: _deepspeed(stage=3, engine_leaf_modules=("Blok",)),
    "deepspeed.needs-optimizer": lambda: _deepspeed(optimizer=None),
    "deepspeed.two-optimizers": lambda: _deepspeed('{"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}'),
    "deepspeed.two-schedulers": lambda: _deepspeed(
        '{"scheduler": {"type": "WarmupLR", "params": {}}}',
        scheduler=SchedulerFacts(name="StepLR", drives_optimizer=True),
    ),
    "deepspeed.unknown-type": lambda: _deepspeed('{"optimizer": {"type": "OneBitAdam"}}', optimizer=None),
    "deepspeed.schedule-alone": lambda: _deepspeed(engine_schedule=Schedule(warmup_steps=10)),
    "deepspeed.scheduler-ticks": lambda: _deepspeed(
        scheduler=SchedulerFacts(name="WarmupLR", drives_optimizer=True), scheduler_ticks=2
    ),
    "deepspeed.untested-optimizer": lambda: _deepspeed(
        '{"zero_allow_untested_optimizer": false}', optimizer=tiny_optimizer(tiny_model(), "SGD", "torch.optim.sgd")
    ),
    "deepspeed.optimizer-state": lambda: _deepspeed(
        optimizer=evolve(tiny_optimizer(tiny_model()), stateful=("norm.weight",))
    ),
    "deepspeed.adagrad": lambda: _deepspeed(
        optimizer=tiny_optimizer(tiny_model(), "Adagrad", "torch.optim.adagrad"),
        scheduler=SchedulerFacts(name="StepLR", drives_optimizer=True),
    ),
    "scheduler.factory": lambda: _ranks(
        Config(), world=1, scheduler=SchedulerFacts(name="halving", drives_optimizer=False, factory=True)
    ),
    "deepspeed.experts": lambda: _deepspeed(stage=3, model=tiny_experts()),
    "compile.unknown-mode": lambda: _ranks(Config(compile=CompileModel(mode="max-autotun")), world=1),
    "compile.no-backend": lambda: _ranks(Config(compile=CompileModel(backend="")), world=1),
    "compile.foreign-backend": lambda: _ranks(Config(compile=CompileModel(backend="indctor")), world=1),
    "compile.switched-off": lambda: _env(Config(compile=CompileModel()), variables=(("TORCHDYNAMO_DISABLE", "1"),)),
    "checkpoint.cache": lambda: _model(
        Config(checkpointing=CheckpointBlocks()),
        evolve(tiny_model(), architecture=ArchitectureFacts(use_cache=True)),
    ),
    "checkpoint.frozen-input": lambda: (
        Config(),
        tiny_facts(marked(tiny_model(frozen=("embed.weight",)), "reentrant", "layers.0")),
    ),
    "loaders.iterable": lambda: _loader(Config(engine=DDP()), iterable=True, length=None),
    "loaders.custom-batches": lambda: _loader(Config(engine=DDP()), custom_batches=True, batch_size=None),
    "loaders.custom-sampler": lambda: _loader(Config(engine=DDP()), sampler="custom"),
    "loaders.already-distributed": lambda: _loader(Config(engine=DDP()), sampler="distributed"),
    "loaders.no-batch": lambda: _loader(Config(engine=DDP(), loaders=ShardLoaders(drop_last=True)), length=1),
    "loaders.fewer-than-ranks": lambda: _loader(Config(engine=DDP()), length=1),
    "loaders.same-data": lambda: _loader(Config(engine=DDP(), loaders=KeepLoaders())),
    **{rule: partial(_healthy, make) for rule, make in WEIGHTS.items()},
    "values.accumulation": lambda: _ranks(Config(accumulation=0), world=1),
    "values.clip": lambda: _ranks(Config(clip=ClipValue(-1.0)), world=1),
    "values.norm-type": lambda: _ranks(Config(clip=ClipNorm(1.0, norm_type=0.0)), world=1),
    "values.scheduler-ticks": lambda: _ranks(Config(scheduler_ticks=-1), world=1),
    "values.timeout": lambda: _ranks(Config(timeout_s=0.0), world=1),
    "values.optimizer": lambda: _ranks(Config(optimizer=AdamW(betas=(0.9, 1.0))), world=1, optimizer=None),
    "values.nesterov": lambda: _ranks(Config(optimizer=SGD(nesterov=True)), world=1, optimizer=None),
    "overrides.unknown": lambda: _ranks(Config(overrides=("mesh.single-many-rank",)), world=1),
}
"""Rule id to a pair on which the rule fires."""
