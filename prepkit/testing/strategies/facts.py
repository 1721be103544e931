"""Strategies for facts: models, optimizers, loaders, checkpoints and environments, flawed or not."""

from __future__ import annotations

from functools import cache

from attrs import evolve
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from prepkit import config as c
from prepkit.config import FP8, FSDP2, BroadcastWeights, CheckpointBlocks, Config, OffloadToCPU
from prepkit.facts import (
    Env,
    Facts,
    GroupFact,
    LoaderFacts,
    MemberFact,
    ModelFacts,
    OptimizerFacts,
    ParamFact,
    SchedulerFacts,
    UnitFact,
)
from prepkit.facts.checkpoint import CheckpointFacts
from prepkit.resolve.modules import select
from prepkit.resolve.resolved import Resolved
from prepkit.testing.strategies.configs import DTYPES
from prepkit.testing.tiny import (
    LIBRARIES,
    PATH,
    arrived,
    in_parts,
    marked,
    tiny_checkpoint,
    tiny_model,
    tiny_optimizer,
    with_batchnorm,
)

_WORLDS = (1, 2, 3, 4, 6, 8, 16, 24, 64, 512)


@st.composite
def model_facts(draw: st.DrawFn, *, flawed: bool = True) -> ModelFacts:
    """Models of up to four repeated blocks: tied or not, partly frozen, of one dtype or several.

    ``flawed`` adds what no config, or not every engine, can take: marks, device maps, packed and lazy parameters.
    """
    model = tiny_model(
        blocks=draw(st.integers(0, 4)),
        width=draw(st.integers(1, 6) | st.just(16)),
        vocab=draw(st.integers(1, 9) | st.just(16)),
        dtype=draw(st.sampled_from(DTYPES)),
        tied=draw(st.booleans()),
        extra=tuple(draw(st.lists(_extras(flawed=flawed), max_size=2, unique_by=lambda param: param.name))),
    )
    frozen = draw(st.sets(st.sampled_from([param.name for param in model.params])))
    params = (evolve(p, requires_grad=p.requires_grad and p.name not in frozen) for p in model.params)
    declared = draw(st.sampled_from(((), ("Block",), ("Block", "Linear"), ("Gone",))))
    own = draw(st.sampled_from(((), _OWN[:2], _OWN[1:2], *((_OWN,) if flawed else ()))))
    model = evolve(model, params=tuple(params), declared_blocks=declared, tensor_plan=own)
    if flawed and draw(st.booleans()):
        paths = st.sampled_from([module.path for module in model.modules])
        model = marked(
            model,
            draw(st.sampled_from(("ddp", "fsdp1", "fsdp2", "autocast", "compiled", "checkpointed", "reentrant"))),
            draw(paths),
        )
    if flawed and draw(st.sampled_from((False,) * 7 + (True,))):
        model = draw(sharded_models(model))
    if flawed and draw(st.booleans()):
        second = draw(st.sampled_from(("cuda:1", "cuda:0", "cpu", "disk")))
        model = evolve(model, device_map=(("embed", "cuda:0"), ("head", second)))
        model = evolve(model, quantised=draw(st.sampled_from(("", "4bit"))))
    if draw(st.booleans()):
        model = with_batchnorm(model)
    cache = draw(st.sampled_from((None, True, False)))
    methods = draw(st.sampled_from(((), ("features", "generate"), ("encode",))))
    return evolve(model, architecture=evolve(model.architecture, use_cache=cache), methods=methods)


_OWN = (("layers.*.mlp", "colwise"), ("norm", "replicated_with_grad_allreduce"), ("layers", "moe_tp_experts"))
"""A model's plan: one row in a style that torch serves, one that is legal with any number of ranks, one in none."""


@cache
def _extras(*, flawed: bool) -> SearchStrategy[ParamFact]:
    unusual = [
        ParamFact(name="norm.scale", shape=(), dtype="float32"),
        ParamFact(name="embed.table", shape=(4,), dtype="int64", requires_grad=False),
        ParamFact(name="layers.packed", shape=(4,), dtype="uint8", requires_grad=False, cls="Params4bit"),
        ParamFact(name="layers.stored", shape=(4, 1), dtype="bfloat16", requires_grad=False, cls="Params4bit"),
        ParamFact(name="head.lazy", shape=(), dtype="float32", cls="UninitializedParameter"),
        ParamFact(name="head.sharded", shape=(4,), dtype="float32", cls="DTensor"),
    ]
    biases = [(at, size, dtype) for at in ("norm", "head") for size in (0, 3) for dtype in DTYPES]
    usual = [ParamFact(name=f"{at}.bias", shape=(size,), dtype=dtype) for at, size, dtype in biases]
    return st.sampled_from([*usual, *(unusual if flawed else unusual[:2])])


_SELDOM = st.integers(0, 7).map(lambda number: number == 7)


@cache
def _samples(*, flawed: bool) -> SearchStrategy[LoaderFacts]:
    return st.builds(
        LoaderFacts,
        batch_size=st.integers(1, 4),
        length=st.integers(0 if flawed else 1, 4096),
        sampler=st.sampled_from(("sequential", "random", "distributed", "custom")),
        iterable=st.booleans(),
        custom_batches=st.booleans(),
        drop_last=st.booleans(),
        batches=st.none() | st.integers(0, 64),
        foreign=_SELDOM,
        own_iteration=_SELDOM,
        shards=st.none() | st.integers(1, 8),
        divided=_SELDOM,
        stateful=st.booleans(),
        pin_memory=st.booleans(),
        workers=st.integers(0, 2),
    )


@st.composite
def facts(draw: st.DrawFn, *, flawed: bool = True) -> Facts:
    """Facts about a drawn model, its optimizer, scheduler and loaders, in environments of 1 to 512 processes.

    Not ``flawed``: some config is legal for them.
    """
    model = draw(model_facts(flawed=flawed))
    optimizer = None
    if any(param.requires_grad for param in model.params) and draw(st.booleans()):
        optimizer = draw(_optimizers(model, flawed=flawed))
    scheduler = None
    if (optimizer or flawed) and draw(st.booleans()):
        drives = not flawed or draw(st.booleans())
        factory = flawed and draw(st.sampled_from((False, False, True)))
        name = draw(st.sampled_from(("StepLR", "WarmupLR")))
        ends = draw(st.none() | st.integers(1, 4000)) if flawed else None
        scheduler = SchedulerFacts(name=name, drives_optimizer=drives, factory=factory, horizon=ends)
    return Facts(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loaders=tuple(draw(st.lists(_samples(flawed=flawed), max_size=2))),
        checkpoint=draw(st.none() | _checkpoints(model, flawed=flawed)),
        env=draw(_envs(flawed=flawed)),
    )


def _checkpoints(model: ModelFacts, *, flawed: bool) -> SearchStrategy[CheckpointFacts]:
    """Checkpoints of this model in one file or two, some in parts; ``flawed`` adds ones that lack a tensor."""
    drops = st.sampled_from(((), (model.params[0].name,))) if flawed else st.just(())
    paths = st.sampled_from((PATH, "elsewhere"))
    checkpoints = st.builds(tiny_checkpoint, st.just(model), drop=drops, files=st.integers(1, 2), path=paths)
    return checkpoints | checkpoints.map(in_parts)


@st.composite
def _optimizers(draw: st.DrawFn, model: ModelFacts, *, flawed: bool) -> OptimizerFacts:
    optimizer = tiny_optimizer(model)
    (group,) = optimizer.groups
    cut = draw(st.integers(0, len(group.slots)))
    groups = tuple(evolve(group, slots=slots) for slots in (group.slots[:cut], group.slots[cut:]) if slots)
    if flawed and draw(st.booleans()):
        groups += (GroupFact(slots=(draw(st.sampled_from((None, model.params[0].name))),)),)
    stateful = tuple(name for name in group.slots if name) if draw(st.booleans()) else ()
    seldom = st.sampled_from((False,) * 7 + (True,))
    module = "bitsandbytes.optim.adamw" if draw(seldom) else "torch.optim.adamw"
    members: tuple[MemberFact, ...] = ()
    if flawed and len(groups) > 1 and draw(st.booleans()):
        members = tuple(MemberFact(name="AdamW", module=module, groups=count) for count in (1, len(groups) - 1))
    own, initial = draw(seldom), bool(stateful) and draw(seldom)
    optimizer = evolve(optimizer, groups=groups, stateful=stateful, initial_state=initial)
    return evolve(optimizer, module=module, keeps_own_list=own, members=members)


@cache
@st.composite
def _envs(draw: st.DrawFn, *, flawed: bool) -> Env:
    world = draw(st.sampled_from(_WORLDS))
    tasks = draw(st.sampled_from((1, world, *([world + 1] if flawed else []))))
    extra = draw(st.sets(st.sampled_from(("ACCELERATE_USE_FSDP", "TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"))))
    return Env(
        world_size=world,
        device=draw(st.sampled_from(("cpu", "cuda", *(["mps"] if flawed else [])))),
        capability=draw(st.sampled_from((None, (7, 0), (9, 0), (10, 0)))),
        bf16=draw(st.sampled_from((None, True, False))),
        torch=draw(st.sampled_from(("", "2.9.1", "2.13.0+cpu", *(["2.5.1", "2.6.0", "2.8.0"] if flawed else [])))),
        libraries=tuple(sorted(draw(st.sets(st.sampled_from(LIBRARIES))) if flawed else LIBRARIES)),
        variables=tuple(sorted({("SLURM_NTASKS", str(tasks)), *((name, "1") for name in extra)})),
    )


def fitting_wraps(model: ModelFacts) -> tuple[c.Wrap, ...]:
    """Selections that name what the model has; the root is always among them."""
    total = sum(param.numel for param in model.params)
    sizes = tuple(c.WrapSize(size) for size in (1, 1 + total // 8, 1 + total))
    named: tuple[c.Wrap, ...] = (c.WrapClasses(("Linear",)), c.WrapPaths(("head",)), c.WrapPaths(("nor?", "embed")))
    if any(module.path == "layers.0" for module in model.modules):
        named += (
            c.WrapClasses(("Block",)),
            c.WrapClasses(("Block", "Linear")),
            c.WrapClasses(("Block",), paths=("head",)),
            c.WrapPaths(("layers.*", "layers.0.mlp")),
        )
    return (c.WrapRoot(), c.WrapBlocks(), *named, *sizes)


def sharded_models(model: ModelFacts) -> SearchStrategy[ModelFacts]:
    """The model cut over a few ranks, with or without a root, whatever config and environment say."""
    roots = st.builds(
        UnitFact,
        path=st.just(""),
        ranks=st.sampled_from((1, 2, 8)),
        copies=st.integers(1, 2),
        reshard_after_forward=st.booleans(),
        param_dtype=st.sampled_from((None, "bfloat16")),
        reduce_dtype=st.sampled_from((None, "float32")),
        offload=st.booleans(),
    )
    paths = st.sets(st.sampled_from(("embed", "norm", "head"))).map(lambda drawn: tuple(sorted(drawn)))
    sharded = st.builds(lambda root, paths: arrived(model, paths=paths, root=root), roots, paths)
    return sharded | sharded.map(lambda model: evolve(model, units=model.units[:-1]))


def can_arrive(cfg: Config, facts: Facts) -> bool:
    """Return whether a model that was sharded as this legal config says can be prepared with it."""
    resolved = Resolved(cfg=cfg, facts=facts)
    return (
        isinstance(cfg.engine, FSDP2)
        and not cfg.engine.ignored
        and not isinstance(cfg.checkpointing, CheckpointBlocks)
        and not isinstance(cfg.precision, FP8)
        and not isinstance(cfg.weights, BroadcastWeights)
        and not resolved.master_weights
        and resolved.axis_size("tensor") == 1
    )


def sharded_for(cfg: Config, facts: Facts) -> Facts:
    """The facts with the model as FSDP2 would have left it."""
    assert isinstance(cfg.engine, FSDP2), "can_arrive has asked"
    resolved = Resolved(cfg=cfg, facts=facts)
    dtypes = resolved.compute_dtypes
    root = UnitFact(
        path="",
        ranks=resolved.axis_size("shard"),
        copies=resolved.axis_size("replicate"),
        reshard_after_forward=False,
        param_dtype=dtypes.param if dtypes else None,
        reduce_dtype=dtypes.reduce if dtypes else None,
        output_dtype=dtypes.output if dtypes else None,
        offload=isinstance(cfg.engine.offload, OffloadToCPU),
    )
    return evolve(facts, model=arrived(facts.model, paths=select(cfg.engine.wrap, facts.model), root=root))
