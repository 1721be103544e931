"""Configs with facts for which no rule has an error, by construction: facts first, then a config that suits them."""

from __future__ import annotations

from attrs import evolve
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from prepkit import config as c
from prepkit.config import FP16, FSDP1, Config, Intent, Mesh, Mixed, OffloadToCPU, Single
from prepkit.facts import Env, Facts, ModelFacts
from prepkit.findings import Severity, errors
from prepkit.plan import Plan
from prepkit.resolve.checkpoint import without_initializer
from prepkit.resolve.mesh import axes, size_of
from prepkit.resolve.modules import select
from prepkit.resolve.resolved import Resolved
from prepkit.rules import RULES, check, fsdp1, fsdp_units, ignored, mesh, model
from prepkit.rules.ddp import lost_in_sync
from prepkit.rules.fsdp_units import REDUCES_ZEROS
from prepkit.rules.mesh import nearest
from prepkit.rules.model import apart
from prepkit.rules.precision import SCALED
from prepkit.rules.weights import RULES as WEIGHTS
from prepkit.testing.strategies.configs import (
    DTYPES,
    bf16s,
    checkpointings,
    clips,
    compiles,
    ddps,
    fp16s,
    fsdp1s,
    fsdp2s,
    loader_choices,
    origins,
    tp_plans,
)
from prepkit.testing.strategies.deepspeed import (
    can_use_deepspeed,
    completed_for_deepspeed,
    facts_for_deepspeed,
    legal_deepspeeds,
)
from prepkit.testing.strategies.facts import can_arrive, fitting_wraps, sharded_for
from prepkit.testing.strategies.facts import facts as any_facts
from prepkit.testing.strategies.fp8 import facts_for_fp8, legal_fp8
from prepkit.testing.strategies.optimizers import optimizers_for

_OFTEN = st.sampled_from((True, True, True, False))
_SELDOM = st.sampled_from((False, False, False, True))
_OVERRIDABLE = tuple(rule.id for rule in RULES if rule.overridable)


def plans() -> SearchStrategy[Plan]:
    """Plans of what ``legal`` draws."""
    from prepkit.planner import plan  # planner and testing are siblings: only this function needs it

    return legal().map(lambda drawn: plan(*drawn).unwrap())


@st.composite
def legal(draw: st.DrawFn, *, float8: bool | None = None) -> tuple[Config, Facts]:
    """Configs with facts, without an error finding; warnings may be there. ``float8``: wherever the model allows it."""
    facts = draw(any_facts(flawed=False))
    float8 = draw(st.sampled_from((False, False, True))) if float8 is None else float8
    zero = not float8 and draw(_SELDOM)
    facts = draw(facts_for_fp8(facts) if float8 else facts_for_deepspeed(facts)) if float8 or zero else facts
    cfg = draw(fitting(facts, float8=float8, zero=zero))
    return cfg, sharded_for(cfg, facts) if can_arrive(cfg, facts) and draw(_SELDOM) else facts


@st.composite
def fitting(draw: st.DrawFn, facts: Facts, *, float8: bool = False, zero: bool = False) -> Config:
    """Configs that are legal for these facts, whose modules are called as those of ``tiny_model``.

    ``float8``, ``zero``: with it, or with DeepSpeed, for facts that suit it.
    """
    device = draw(st.sampled_from((None, facts.env.device, *([] if float8 or zero else ["cpu"]))))
    precision = draw(bf16s(invalid=False) if float8 else precisions_for(facts, device))
    zero = zero and can_use_deepspeed(facts, precision)
    trains = facts.optimizer is not None or (any(p.requires_grad for p in facts.model.params) and draw(_OFTEN))
    intent = Intent.TRAINING if trains else Intent.INFERENCE
    kind = c.DeepSpeed if zero else draw(st.sampled_from(engines_for(facts, precision, intent, float8=float8)))
    mesh = draw(st.sampled_from(meshes_for(kind, facts.env.world_size, float8=float8)))
    tensor_ranks = 1 if zero else size_of("tensor", axes(Config(engine=kind(), mesh=mesh), facts.env) or ())
    if zero:
        engine: c.Engine = draw(legal_deepspeeds(facts, trains))
    elif kind is c.FSDP1:
        engine = draw(legal_fsdp1(facts, Config(precision=precision, mesh=mesh, device=device, intent=intent)))
    else:
        engine = draw(engine_options(kind, facts, mesh, device or facts.env.device))
    many_xla = isinstance(engine, c.XLA) and facts.env.world_size > 1
    blocks = [wrap for wrap in fitting_wraps(facts.model) if select(wrap, facts.model)]
    uncompiled = replaces_parameters(engine)
    compiled = draw(st.just(None) if uncompiled else compiles_for(facts.env, blocks, engine))
    wrapped: SearchStrategy[c.ActivationCheckpointing] = st.just(None)
    if blocks:
        how = checkpointings(st.sampled_from(blocks), invalid=False, compiled=compiled is not None)
        wrapped = how.map(lambda one: _some_block(one, facts))
    cfg = Config(
        engine=engine,
        mesh=mesh,
        tp_plan=draw(tp_plans_for(facts.model, tensor_ranks, asked=kind is c.TensorParallel or tensor_ranks > 1)),
        precision=precision,
        compile=compiled,
        checkpointing=draw(wrapped),
        intent=intent,
        weights=draw(st.just(None) if float8 else weights_for(facts, engine)),
        device=device,
        keep_device_map=draw(st.booleans()),
        backend=draw(backends_for(engine, device or facts.env.device)),
        timeout_s=draw(st.floats(1.0, 3600.0)),
        optimizer=draw(optimizers_for(facts, Config(engine=engine, mesh=mesh, precision=precision)))
        if trains and facts.optimizer is None and draw(_OFTEN)
        else None,
        accumulation=draw(st.integers(1, 8)),
        average_each=False if isinstance(engine, c.DeepSpeed | c.XLA) else draw(st.booleans()),
        clip=draw(clips(invalid=False)),
        scheduler_ticks=draw(st.integers(0, 4)),
        total_steps=draw(st.none() | st.integers(1, 4000)),
        loaders=draw(loaders_for(facts, zero=zero) if not many_xla else st.just(c.KeepLoaders())),
        entry_points=draw(entry_points_for(facts.model)),
        origins=draw(origins()),
        overrides=tuple(draw(st.lists(st.sampled_from(_OVERRIDABLE), max_size=2, unique=True))),
    )
    if isinstance(engine, c.FSDP1):
        cfg = without_refused_accumulation(cfg, facts)
    if isinstance(engine, c.DeepSpeed):
        cfg = completed_for_deepspeed(cfg, facts, draw)
    cfg = draw(legal_fp8(cfg, facts)) if float8 else cfg
    return _with_global_batch(cfg, facts, draw)


def _with_global_batch(cfg: c.Config, facts: Facts, draw: st.DrawFn) -> c.Config:
    """Sometimes the samples of the drawn window in the place of, or beside, its number of micro-batches."""
    whole = Resolved(cfg=cfg, facts=facts).batch.at_once
    if whole is None or isinstance(cfg.engine, c.DeepSpeed) or not draw(_OFTEN):
        return cfg
    written = cfg.accumulation if draw(st.booleans()) else None
    return evolve(cfg, global_batch=whole * (cfg.accumulation or 1), accumulation=written)


def _some_block(how: c.ActivationCheckpointing, facts: Facts) -> c.ActivationCheckpointing:
    """Every n-th block, where there are n of them."""
    if isinstance(how, c.CheckpointBlocks) and how.every > len(select(how.blocks, facts.model)):
        return evolve(how, every=1)
    return how


_FILLED = c.Single | c.DDP | c.FSDP1 | c.FSDP2 | c.TensorParallel | c.DeepSpeed


def _checkpoint_fits(facts: Facts, weights: c.LoadWeights) -> bool:
    """Return whether the checkpoint is of this model still: float8 and ZeRO may have given it other layers since."""
    checks = (rule.check for rule in WEIGHTS if rule.severity is Severity.ERROR)
    return not any(hit for check in checks for hit in check(Resolved(cfg=Config(weights=weights), facts=facts)))


def weights_for(facts: Facts, engine: c.Engine) -> SearchStrategy[c.Weights]:
    """Initialisers where each parameter has one, the checkpoint that was seen, and what rank 0 has."""
    options: list[c.Weights] = [None]
    if not isinstance(engine, _FILLED) or facts.model.quantised or len(facts.model.device_map) > 1:
        return st.just(None)
    if not without_initializer(facts.model, (param.name for param in facts.model.params)):
        options += [c.InitWeights(0), c.InitWeights(7)]
    if facts.checkpoint is not None and _checkpoint_fits(facts, c.LoadWeights(facts.checkpoint.path)):
        loads = [c.LoadWeights(facts.checkpoint.path, rename=rename) for rename in ((), (("^absent[.]", ""),))]
        options += 2 * loads  # few facts have a checkpoint that fits
    if not isinstance(engine, Single) and not (facts.optimizer and facts.optimizer.stateful):
        options.append(c.BroadcastWeights())
    return st.sampled_from(options)


def precisions_for(facts: Facts, device: str | None) -> SearchStrategy[c.Precision]:
    """None, and 16 bits where the device computes in them; float16 with master weights where it trains float16."""
    env = facts.env
    old = env.bf16 is False or (env.capability is not None and env.capability < (8, 0))
    forced_to_cpu = device == "cpu" != env.device
    options: list[SearchStrategy[c.Precision]] = []
    if (device or env.device) in SCALED:
        narrow = any(param.dtype == "float16" and param.requires_grad for param in facts.model.params)
        options += [
            fp16s(invalid=False).map(lambda fp16: evolve(fp16, master_weights=fp16.master_weights or narrow))
        ] * 2
    if not old or forced_to_cpu:
        options += [bf16s(invalid=False)] * 2
    return st.one_of(*options, st.just(None))  # which fits all facts, and is drawn often enough


def engines_for(facts: Facts, precision: c.Precision, intent: Intent, *, float8: bool) -> tuple[type[c.Engine], ...]:
    """The engines that can take these facts: FSDP2 only what it can shard, Single only one process."""
    trained = {param.dtype for param in facts.model.params if param.requires_grad}
    if isinstance(precision, Mixed) and precision.master_weights and intent is Intent.TRAINING:
        trained = {"float32"}
    optimizer = facts.optimizer
    shardable = (
        len(trained) <= 1
        and all(param.dtype in DTYPES for param in facts.model.params)
        and not any(0 in param.shape and param.requires_grad for param in facts.model.params)
        and not (optimizer and (optimizer.keeps_own_list or optimizer.module.startswith("bitsandbytes")))
    )
    alone = facts.env.world_size == 1
    # FSDP2 has the most to go wrong, and the fewest facts that suit it: where they do, it is drawn most often.
    flattened = not (optimizer and optimizer.keeps_own_list) and can_use_fsdp1(
        Config(precision=precision, intent=intent), facts
    )
    flat = (c.FSDP1,) * 4 if flattened else ()
    on_xla = (c.XLA,) if not float8 and not isinstance(precision, FP16) and not facts.model.device_map else ()
    elementwise = not (optimizer and (optimizer.keeps_own_list or optimizer.module.startswith("bitsandbytes")))
    parallel = (c.TensorParallel,) if elementwise and not float8 else ()
    return (*flat, *((c.FSDP2,) * 3 if shardable else ()), *((Single,) if alone else ()), *parallel, c.DDP, *on_xla)


def meshes_for(kind: type[c.Engine], world: int, *, float8: bool) -> tuple[Mesh | None, ...]:
    """Every way to write a layout of the ranks: sizes in full, or with the rest left open."""
    if kind is Single:
        return (None, Mesh(), Mesh(replicate=1, shard=1))
    if kind in (c.XLA, c.DeepSpeed):
        return (None,)
    if kind is c.DDP:
        return (None, Mesh(replicate=world), Mesh(replicate=world, shard=1), Mesh(replicate=-1, shard=1))
    if kind is c.TensorParallel:
        return (None, Mesh(shard=1, tensor=-1), Mesh(tensor=world))
    full = nearest(Mesh(), world)
    if kind is c.FSDP2 and not float8:
        full += tuple(mesh for mesh in nearest(Mesh(tensor=2), world) if mesh.tensor > 1)[:4]
    return (None, *full, *(evolve(mesh, shard=-1) for mesh in full), *(evolve(mesh, replicate=-1) for mesh in full))


def engine_options(kind: type[c.Engine], facts: Facts, mesh: Mesh | None, device: str) -> SearchStrategy[c.Engine]:
    """The engine of this kind with all options that the model, the mesh and the device allow."""
    if kind is Single:
        return st.just(Single())
    if kind is c.DDP:
        return ddps(invalid=False, accelerated=device in ("cuda", "xpu"), synced=not lost_in_sync(facts.model))
    if kind is c.XLA:
        return st.builds(c.XLA, forked=st.booleans())
    if kind is c.TensorParallel:
        return st.just(c.TensorParallel())
    shards = size_of("shard", axes(Config(engine=c.FSDP2(), mesh=mesh), facts.env) or ())
    factors = [size for size in range(2, shards) if shards % size == 0]
    wraps = [wrap for wrap in fitting_wraps(facts.model) if not any(apart(select(wrap, facts.model), facts.model))]
    ignored = st.sampled_from(((), (), (), ("head",), ("norm", "embed")))
    zeros = facts.env.release >= REDUCES_ZEROS
    return fsdp2s(st.sampled_from(wraps), st.sampled_from([True, False, *factors]), ignored, zeros=zeros)


def tp_plans_for(model: ModelFacts, tensor_ranks: int, *, asked: bool) -> SearchStrategy[c.TensorParallelPlan]:
    """Plans that suit so many tensor ranks: whole layers suit any number, split ones what divides their sizes."""
    plain = tp_plans(("norm",), ("sequence", "replicate"))
    mlp = next((p.shape for p in model.params if p.name == "layers.0.mlp.weight"), (1, 1))
    able = tuple(
        style for style, size in zip(("colwise", "rowwise"), mlp, strict=True) if size > 1 and size % tensor_ranks == 0
    )
    split = tp_plans(("norm", "layers.?.mlp"), ("replicate",)) if not able else tp_plans(("layers.*.mlp",), able)
    has_own = model.tensor_plan and (mlp[0] % tensor_ranks == 0 or len(model.tensor_plan) == 1)
    return (
        plain
        | (split if "layers.0.mlp" in {m.path for m in model.modules} else plain)
        | (st.just(c.TPPlanFromModel()) if has_own or not asked else plain)
    )


def compiles_for(env: Env, blocks: list[c.Wrap], engine: c.Engine) -> SearchStrategy[c.Compile]:
    """Every way to compile that the environment and the engine allow."""
    small = isinstance(engine, c.DDP) and engine.bucket_cap_mb < 1
    if small or not {name for name, _ in env.variables}.isdisjoint(("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")):
        return st.just(None)
    drawn = compiles(st.sampled_from(blocks) if blocks else None, invalid=False)
    return drawn.map(_for_xla) if isinstance(engine, c.XLA) else drawn


def _for_xla(compiled: c.Compile) -> c.Compile:
    return (
        evolve(compiled, backend="openxla", options=())
        if isinstance(compiled, c.CompileModel | c.CompileBlocks)
        else compiled
    )


def backends_for(engine: c.Engine, device: str) -> SearchStrategy[str | None]:
    """Backends that serve the device, and the CPU too where it is offloaded to."""
    offloads = (isinstance(engine, c.FSDP2) and isinstance(engine.offload, OffloadToCPU)) or (
        isinstance(engine, c.FSDP1) and engine.offload
    )
    alone = () if device == "cpu" or offloads else ("nccl",)
    return st.sampled_from((None, "gloo", "cpu:gloo,cuda:nccl", *alone))


def loaders_for(facts: Facts, *, zero: bool) -> SearchStrategy[c.Loaders]:
    """Return what may be done with these loaders; ``zero``: with DeepSpeed, which counts those for training."""
    world = facts.env.world_size
    split = world == 1 or all(
        not (loader.foreign or loader.own_iteration or loader.divided or loader.sampler == "distributed")
        and (loader.length or 0) // world >= (loader.batch_size or 1)
        and (not loader.custom_batches or (loader.batches or 0) >= world)
        for loader in facts.loaders
    )
    choices = (
        loader_choices(len(facts.loaders), split=world == 1)
        if split
        else st.builds(c.KeepLoaders, to_device=st.booleans())
    )
    return choices.filter(_all_train) if zero else choices


def _all_train(how: c.Loaders) -> bool:
    each = how.choices if isinstance(how, c.EachLoader) else (how,)
    return all(one.purpose == "training" for one in each)


def entry_points_for(model: ModelFacts) -> SearchStrategy[tuple[str, ...] | None]:
    """The well-known ones, none, or any of the model's methods."""
    return st.none() | st.lists(st.sampled_from(model.methods), unique=True).map(tuple) if model.methods else st.none()


_RULES = (*fsdp1.RULES, *ignored.RULES, *mesh.RULES, *model.RULES, *fsdp_units.RULES)


def can_use_fsdp1(cfg: Config, facts: Facts) -> bool:
    """Return whether the root alone as a unit, with its parameters kept, is legal: then something is."""
    return not errors(check(evolve(cfg, engine=FSDP1(wrap=c.WrapRoot())), facts, _RULES))


def replaces_parameters(engine: c.Engine) -> bool:
    """Return whether the model's own parameters give way to flat ones, so that nothing can be compiled."""
    return isinstance(engine, FSDP1) and not engine.use_orig_params


def without_refused_accumulation(cfg: Config, facts: Facts) -> Config:
    """One micro-batch per step where torch cannot keep gradients in between."""
    return evolve(cfg, accumulation=1) if errors(check(cfg, facts, fsdp1.RULES)) else cfg


def legal_fsdp1(facts: Facts, base: Config) -> SearchStrategy[FSDP1]:
    """FSDP1 for this mesh, precision, device and intent, with arguments that no rule refuses for these facts."""
    cpu = "cpu" in (base.device, facts.env.device)
    shardings = [
        sharding
        for sharding in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
        if not errors(check(evolve(base, engine=FSDP1(sharding=sharding)), facts, mesh.RULES))
    ]
    switch = st.just(value=False) if cpu else st.booleans()
    return st.tuples(st.sampled_from(shardings), _arguments(base, facts)).flatmap(
        lambda drawn: fsdp1s(
            st.just(drawn[1][0]),
            (drawn[0],),
            st.just(drawn[1][1]),
            use_orig_params=st.just(drawn[1][2]),
            offload=switch,
            sync_module_states=switch,
        )
    )


_Arguments = tuple[c.Wrap, tuple[str, ...], bool]
_SAFE: _Arguments = (c.WrapRoot(), (), True)
"""What ``can_use_fsdp1`` has found legal: any other combination that a rule refuses gives way to it."""


def _arguments(base: Config, facts: Facts) -> SearchStrategy[_Arguments]:
    own = (*fsdp1.RULES, *ignored.RULES, *model.RULES, *fsdp_units.RULES)

    def legal(drawn: _Arguments) -> _Arguments:
        wrap, left_out, original = drawn
        engine = FSDP1(wrap=wrap, ignored=left_out, use_orig_params=original)
        return _SAFE if errors(check(evolve(base, engine=engine), facts, own)) else drawn

    patterns = st.sampled_from(((), (), ("head",), ("norm", "embed")))
    return st.tuples(st.sampled_from(fitting_wraps(facts.model)), patterns, st.booleans()).map(legal)
