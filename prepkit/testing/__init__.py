"""Hypothesis strategies for configs, facts and plans: for our laws, and for rules and tools of your own.

``configs()`` and ``facts()`` draw anything that the types allow within small bounds, right or wrong. ``legal()`` draws
pairs without an error, by construction: facts first, then a config that suits them. ``plans()`` plans legal pairs::

    @given(legal())
    def test_my_rule_is_silent_on_legal_pairs(pair):
        assert not [finding for finding in check(*pair, rules=(MY_RULE,)) if finding.severity is Severity.ERROR]

For each rule ``COUNTEREXAMPLES`` has a pair on which it fires; ``tiny_model`` and its friends make such pairs by hand.
"""

from __future__ import annotations

from attrs import evolve
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from prepkit import config as c
from prepkit.config import FP16, AsStored, Config, Intent, Mesh, Mixed, OffloadToCPU, Single
from prepkit.facts import Env, Facts, ModelFacts
from prepkit.findings import Severity
from prepkit.plan import Plan
from prepkit.resolve.checkpoint import without_initializer
from prepkit.resolve.mesh import axes, size_of
from prepkit.resolve.modules import select
from prepkit.resolve.resolved import Resolved
from prepkit.rules import RULES
from prepkit.rules.ddp import lost_in_sync
from prepkit.rules.mesh import nearest
from prepkit.rules.precision import SCALED
from prepkit.rules.ties import apart
from prepkit.rules.weights import RULES as WEIGHTS
from prepkit.testing.counterexamples import COUNTEREXAMPLES as _COUNTEREXAMPLES
from prepkit.testing.strategies.configs import (
    DTYPES,
    bf16s,
    checkpointings,
    clips,
    compiles,
    configs,
    ddps,
    fp16s,
    fsdp2s,
    loader_choices,
    optimizer_specs,
    tensor_rows,
)
from prepkit.testing.strategies.deepspeed import fitted, legal_deepspeeds, suit
from prepkit.testing.strategies.deepspeed import suited as zero_suits
from prepkit.testing.strategies.facts import facts, fitting_wraps, model_facts
from prepkit.testing.strategies.fp8 import legal_fp8, suited
from prepkit.testing.strategies.fsdp1 import gone, legal_fsdp1, settled, suits
from prepkit.testing.strategies.sharded import can_arrive, sharded_for
from prepkit.testing.tiny import marked, tiny_facts, tiny_loader, tiny_model, tiny_optimizer

__all__ = [
    "COUNTEREXAMPLES",
    "configs",
    "facts",
    "fitting",
    "legal",
    "marked",
    "model_facts",
    "plans",
    "tiny_facts",
    "tiny_loader",
    "tiny_model",
    "tiny_optimizer",
]

_ORDER = {rule.id: place for place, rule in enumerate(RULES)}
COUNTEREXAMPLES = dict(sorted(_COUNTEREXAMPLES.items(), key=lambda item: _ORDER.get(item[0], -1)))
"""Rule id to a pair on which the rule fires, in the order of the rules."""

_OFTEN = st.sampled_from((True, True, True, False))
_FILLED = c.Single | c.DDP | c.FSDP2
_SELDOM = st.sampled_from((False, False, False, True))
_OVERRIDABLE = tuple(rule.id for rule in RULES if rule.overridable)


def plans() -> SearchStrategy[Plan]:
    """Plans of legal pairs."""
    from prepkit.planner import plan  # planner and testing are siblings: only this function needs it

    return legal().map(lambda pair: plan(*pair).unwrap())


@st.composite
def legal(draw: st.DrawFn, *, float8: bool | None = None) -> tuple[Config, Facts]:
    """Pairs without an error finding. Warnings may be there. ``float8``: with it wherever the model allows it."""
    seen = draw(facts(flawed=False))
    float8 = draw(st.sampled_from((False, False, True))) if float8 is None else float8
    zero = not float8 and draw(_SELDOM)
    seen = draw(suited(seen) if float8 else suit(seen)) if float8 or zero else seen
    cfg = draw(fitting(seen, float8=float8, zero=zero))
    return cfg, sharded_for(cfg, seen) if can_arrive(cfg, seen) and draw(_SELDOM) else seen


@st.composite
def fitting(draw: st.DrawFn, seen: Facts, *, float8: bool = False, zero: bool = False) -> Config:
    """Configs that are legal for these facts, whose modules are called as those of ``tiny_model``.

    ``float8``, ``zero``: with it, or with DeepSpeed, for facts that suit it.
    """
    device = draw(st.sampled_from((None, seen.env.device, *([] if float8 or zero else ["cpu"]))))
    precision = draw(bf16s(odd=False) if float8 else _precision(seen, device))
    zero = zero and zero_suits(seen, precision)
    trains = seen.optimizer is not None or (any(p.requires_grad for p in seen.model.params) and draw(_OFTEN))
    intent = Intent.TRAINING if trains else Intent.INFERENCE
    kind = c.DeepSpeed if zero else draw(st.sampled_from(_engines(seen, precision, intent, float8=float8)))
    mesh = draw(st.sampled_from(_meshes(kind, seen.env.world_size, float8=float8)))
    parts = 1 if zero else size_of("tensor", axes(Config(engine=kind(), mesh=mesh), seen.env) or ())
    if zero:
        engine: c.Engine = draw(legal_deepspeeds(seen, trains))
    elif kind is c.FSDP1:
        engine = draw(legal_fsdp1(seen, Config(precision=precision, mesh=mesh, device=device, intent=intent)))
    else:
        engine = draw(_engine(kind, seen, mesh, device or seen.env.device))
    many_xla = isinstance(engine, c.XLA) and seen.env.world_size > 1
    blocks = [wrap for wrap in fitting_wraps(seen.model) if select(wrap, seen.model)]
    cfg = Config(
        engine=engine,
        mesh=mesh,
        tp_plan=draw(_tensor(seen.model, parts, asked=kind is c.TensorParallel or parts > 1)),
        precision=precision,
        compile=draw(st.just(c.NoCompile()) if gone(engine) else _compile(seen.env, blocks, engine)),
        checkpointing=draw(checkpointings(st.sampled_from(blocks)) if blocks else st.just(c.NoCheckpointing())),
        intent=intent,
        weights=draw(st.just(c.KeepWeights()) if float8 else _weights(seen, engine)),
        device=device,
        keep_device_map=draw(st.booleans()),
        backend=draw(_backend(engine, device or seen.env.device)),
        timeout_s=draw(st.floats(1.0, 3600.0)),
        optimizer=draw(st.none() | optimizer_specs(odd=False)) if trains and seen.optimizer is None else None,
        accumulation=draw(st.integers(1, 8)),
        clip=draw(clips(odd=False)) if not many_xla else c.NoClip(),
        scheduler_ticks=draw(st.integers(0, 4)),
        loaders=draw(loader_choices() if _can_split(seen) and not many_xla else st.just(c.KeepLoaders())),
        overrides=tuple(draw(st.lists(st.sampled_from(_OVERRIDABLE), max_size=2, unique=True))),
    )
    if isinstance(engine, c.FSDP1):
        cfg = settled(cfg, seen)
    if isinstance(engine, c.DeepSpeed):
        cfg = fitted(cfg, seen, draw)
    return draw(legal_fp8(cfg, seen)) if float8 else cfg


def _fits(seen: Facts, how: c.LoadWeights) -> bool:
    """Whether the checkpoint is of this model still: float8 and ZeRO may have given it other layers since."""
    checks = (rule.check for rule in WEIGHTS if rule.severity is Severity.ERROR)
    return not any(hit for check in checks for hit in check(Resolved(cfg=Config(weights=how), facts=seen)))


def _weights(seen: Facts, engine: c.Engine) -> SearchStrategy[c.Weights]:
    """Initialisers where each parameter has one, the checkpoint that was seen, and what rank 0 has."""
    options: list[c.Weights] = [c.KeepWeights()]
    if not isinstance(engine, _FILLED) or seen.model.quantised or len(seen.model.device_map) > 1:
        return st.just(c.KeepWeights())
    if not without_initializer(seen.model, (param.name for param in seen.model.params)):
        options += [c.InitWeights(0), c.InitWeights(7)]
    if seen.checkpoint is not None and _fits(seen, c.LoadWeights(seen.checkpoint.path)):
        how = [c.LoadWeights(seen.checkpoint.path, rename=how) for how in ((), (("^absent[.]", ""),))]
        options += 2 * how  # few facts have a checkpoint that fits
    if not isinstance(engine, Single) and not (seen.optimizer and seen.optimizer.stateful):
        options.append(c.SendWeights())
    return st.sampled_from(options)


def _precision(seen: Facts, device: str | None) -> SearchStrategy[c.Precision]:
    env = seen.env
    old = env.bf16 is False or (env.capability is not None and env.capability < (8, 0))
    forced_to_cpu = device == "cpu" != env.device
    able: list[SearchStrategy[c.Precision]] = []
    if (device or env.device) in SCALED:
        narrow = any(param.dtype == "float16" and param.requires_grad for param in seen.model.params)
        able += [fp16s(odd=False).map(lambda how: evolve(how, master_weights=how.master_weights or narrow))] * 2
    if not old or forced_to_cpu:
        able += [bf16s(odd=False)] * 2
    return st.one_of(*able, st.just(AsStored()))  # which fits all facts, and is drawn often enough


def _engines(seen: Facts, precision: c.Precision, intent: Intent, *, float8: bool) -> tuple[type[c.Engine], ...]:
    """The engines that can take these facts: FSDP2 only what it can shard, Single only one process."""
    trained = {param.dtype for param in seen.model.params if param.requires_grad}
    if isinstance(precision, Mixed) and precision.master_weights and intent is Intent.TRAINING:
        trained = {"float32"}
    held = seen.optimizer
    shardable = (
        len(trained) <= 1
        and all(param.shape and param.dtype in DTYPES for param in seen.model.params)
        and not any(0 in param.shape and param.requires_grad for param in seen.model.params)
        and not (held and (held.keeps_own_list or held.module.startswith("bitsandbytes")))
    )
    alone = seen.env.world_size == 1
    # FSDP2 has the most to go wrong, and the fewest facts that suit it: where they do, it is drawn most often.
    flattened = not (held and held.keeps_own_list) and suits(Config(precision=precision, intent=intent), seen)
    flat = (c.FSDP1,) * 4 if flattened else ()
    on_xla = (c.XLA,) if not float8 and not isinstance(precision, FP16) and not seen.model.device_map else ()
    plain = not (held and (held.keeps_own_list or held.module.startswith("bitsandbytes")))
    cut = (c.TensorParallel,) if plain and not float8 else ()
    return (*flat, *((c.FSDP2,) * 3 if shardable else ()), *((Single,) if alone else ()), *cut, c.DDP, *on_xla)


def _meshes(kind: type[c.Engine], world: int, *, float8: bool) -> tuple[Mesh | None, ...]:
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


def _engine(kind: type[c.Engine], seen: Facts, mesh: Mesh | None, device: str) -> SearchStrategy[c.Engine]:
    if kind is Single:
        return st.just(Single())
    if kind is c.DDP:
        return ddps(odd=False, accelerated=device in ("cuda", "xpu"), synced=not lost_in_sync(seen.model))
    if kind is c.XLA:
        return st.builds(c.XLA, forked=st.booleans())
    if kind is c.TensorParallel:
        return st.just(c.TensorParallel())
    shards = size_of("shard", axes(Config(engine=c.FSDP2(), mesh=mesh), seen.env) or ())
    factors = [size for size in range(2, shards) if shards % size == 0]
    wraps = [wrap for wrap in fitting_wraps(seen.model) if not any(apart(select(wrap, seen.model), seen.model))]
    return fsdp2s(st.sampled_from(wraps), st.sampled_from([True, False, *factors]))


def _tensor(model: ModelFacts, parts: int, *, asked: bool) -> SearchStrategy[c.TensorParallelPlan]:
    """Plans that suit so many tensor ranks: whole layers suit any number, cut ones what divides their sizes."""
    plain = tensor_rows(("norm",), ("sequence", "replicate"))
    mlp = next((p.shape for p in model.params if p.name == "layers.0.mlp.weight"), (1, 1))
    able = tuple(
        style for style, size in zip(("colwise", "rowwise"), mlp, strict=True) if size > 1 and size % parts == 0
    )
    cut = tensor_rows(("norm", "layers.?.mlp"), ("replicate",)) if not able else tensor_rows(("layers.*.mlp",), able)
    own = model.tensor_plan and (mlp[0] % parts == 0 or len(model.tensor_plan) == 1)
    return (
        plain
        | (cut if "layers.0.mlp" in {m.path for m in model.modules} else plain)
        | (st.just(c.TPPlanFromModel()) if own or not asked else plain)
    )


def _compile(env: Env, blocks: list[c.Wrap], engine: c.Engine) -> SearchStrategy[c.Compile]:
    small = isinstance(engine, c.DDP) and engine.bucket_cap_mb < 1
    if small or not {name for name, _ in env.variables}.isdisjoint(("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")):
        return st.just(c.NoCompile())
    drawn = compiles(st.sampled_from(blocks) if blocks else None, odd=False)
    return drawn.map(_for_xla) if isinstance(engine, c.XLA) else drawn


def _for_xla(how: c.Compile) -> c.Compile:
    return evolve(how, backend="openxla") if isinstance(how, c.CompileModel | c.CompileBlocks) else how


def _backend(engine: c.Engine, device: str) -> SearchStrategy[str | None]:
    offloads = isinstance(engine, c.FSDP2) and isinstance(engine.offload, OffloadToCPU)
    alone = () if device == "cpu" or offloads else ("nccl",)
    return st.sampled_from((None, "gloo", "cpu:gloo,cuda:nccl", *alone))


def _can_split(seen: Facts) -> bool:
    """Whether every loader may be sharded, with any ``drop_last``."""
    world = seen.env.world_size
    return world == 1 or all(
        loader.sampler in ("sequential", "random")
        and not (loader.iterable or loader.custom_batches)
        and (loader.length or 0) // world >= (loader.batch_size or 1)
        for loader in seen.loaders
    )
