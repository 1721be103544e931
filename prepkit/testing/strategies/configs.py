"""Strategies for configs: everything that the types allow, within small bounds."""

from __future__ import annotations

from functools import cache

from attrs import evolve
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from prepkit import config as c
from prepkit.config import (
    BF16,
    DDP,
    FP16,
    FSDP1,
    FSDP2,
    XLA,
    Config,
    Intent,
    Mesh,
    OffloadToCPU,
    Single,
    TensorParallel,
)
from prepkit.rules import RULES
from prepkit.rules.compile import MODES
from prepkit.testing.strategies.deepspeed import deepspeeds
from prepkit.testing.strategies.fp8 import fp8_backends, fp8s
from prepkit.testing.strategies.optimizers import optimizer_specs, several_optimizers
from prepkit.testing.tiny import PATH

DTYPES = ("float32", "bfloat16", "float16")
_IDS = tuple(rule.id for rule in RULES)
_FLAGS = ("broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")


@cache
def _wraps() -> SearchStrategy[c.Wrap]:
    names = st.lists(st.sampled_from(("Block", "Linear", "ModuleList", "Tiny", "blok", "")), max_size=3).map(tuple)
    paths = st.lists(st.sampled_from(("layers.*", "layers.0", "layers", "*.?.mlp", "head", "no.*", "")), max_size=3)
    return st.one_of(
        st.just(c.WrapBlocks()),
        st.just(c.WrapRoot()),
        st.builds(c.WrapClasses, names, st.just(()) | paths.map(tuple)),
        st.builds(c.WrapPaths, paths.map(tuple)),
        st.builds(c.WrapSize, st.integers(-1, 200)),
    )


@cache
def ddps(*, invalid: bool = True, accelerated: bool = True, synced: bool = True) -> SearchStrategy[DDP]:
    """DDP with all its options; ``invalid`` adds sizes out of range, ``accelerated`` what only accelerators do.

    ``synced`` adds synchronised batch norms, where they can be.
    """
    size = st.sampled_from((25.0, 1.0, 0.5, *((0.0, -1.0) if invalid else ())))
    hooks = comm_hooks(invalid=invalid, bfloat16=accelerated)
    flags = {name: st.booleans() for name in _FLAGS}
    syncs = st.sampled_from((False, True) if accelerated and synced else (False,))
    return st.builds(DDP, bucket_cap_mb=size, hook=hooks, sync_batchnorm=syncs, **flags)


@cache
def comm_hooks(*, invalid: bool = True, bfloat16: bool = True) -> SearchStrategy[c.CommHook]:
    """Every hook; ``bfloat16`` allows what only NCCL and XCCL reduce, ``invalid`` adds numbers out of range."""
    low = ("float16", *(("bfloat16",) if bfloat16 else ()))
    number = st.floats(-0.5 if invalid else 0.125, 4.0)
    powersgd = st.builds(
        c.PowerSGDHook,
        rank=st.integers(0 if invalid else 1, 4),
        start_iter=st.integers(0 if invalid else 2, 100),
        min_compression_rate=number,
        use_error_feedback=st.booleans(),
        warm_start=st.booleans(),
        orthogonalization_epsilon=number,
        random_seed=st.integers(0, 3),
        batch_tensors_with_same_shape=st.booleans(),
        wrapper=st.sampled_from(("none", *low)),
    )
    compress = st.builds(c.CompressHook, dtype=st.sampled_from(low[::-1]))
    return st.just(None) | compress | powersgd | powersgd | (compress if bfloat16 else powersgd)


def fsdp2s(
    wraps: SearchStrategy[c.Wrap],
    reshard: SearchStrategy[bool | int],
    ignored: SearchStrategy[tuple[str, ...]] | None = None,
    casts: SearchStrategy[bool] | None = None,
    *,
    zeros: bool = True,
) -> SearchStrategy[FSDP2]:
    """FSDP2 with these selections and ways to reshard, on the device or offloaded; ``ignored`` as in ``fsdp1s``.

    Units cast their inputs unless ``casts`` draws otherwise, for a model written so; ``zeros`` is for torch 2.13.
    """
    inputs = st.just(value=True) if casts is None else casts
    offload = st.just(None) | st.builds(OffloadToCPU, pin_memory=st.booleans())
    patterns = st.lists(st.sampled_from(_PATTERNS), max_size=2).map(tuple) if ignored is None else ignored
    rest = {
        "ignored": patterns,
        "cast_forward_inputs": inputs,
        "reduce_unused": st.sampled_from((False, True) if zeros else (False,)),
    }
    return st.builds(FSDP2, wrap=wraps, reshard_after_forward=reshard, offload=offload, **rest)


_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_PATTERNS = ("embed", "head", "layers.*", "norm", "no.*", "")


def fsdp1s(
    wraps: SearchStrategy[c.Wrap],
    shardings: tuple[str, ...] = _STRATEGIES,
    ignored: SearchStrategy[tuple[str, ...]] | None = None,
    **fixed: SearchStrategy[bool],
) -> SearchStrategy[FSDP1]:
    """FSDP1 with these selections and strategies; without ``ignored`` any patterns, also such as match nothing."""
    usual = {name: st.booleans() for name in ("use_orig_params", "offload", "sync_module_states")} | fixed
    patterns = st.lists(st.sampled_from(_PATTERNS), max_size=2).map(tuple)
    return st.builds(
        FSDP1,
        wrap=wraps,
        sharding=st.sampled_from(shardings),
        ignored=patterns if ignored is None else ignored,
        backward_prefetch=st.sampled_from(("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")),
        forward_prefetch=st.booleans(),
        limit_all_gathers=st.booleans(),
        buffer_dtype=st.sampled_from((None, *DTYPES)),
        **usual,
    )


@cache
def precisions(*, invalid: bool = True) -> SearchStrategy[c.Precision]:
    """None, BF16 and FP16; ``invalid`` adds float16 beside bfloat16, and loss scales out of range."""
    return st.just(None) | bf16s(invalid=invalid) | fp16s(invalid=invalid)


@cache
def bf16s(*, invalid: bool = True) -> SearchStrategy[BF16]:
    """BF16 with all its options; ``invalid`` adds float16 beside bfloat16."""
    dtype = st.sampled_from(DTYPES if invalid else DTYPES[:2])
    return st.builds(BF16, reduce_dtype=dtype, output_dtype=dtype, master_weights=st.booleans())


@cache
def fp16s(*, invalid: bool = True) -> SearchStrategy[FP16]:
    """FP16 with all its options; ``invalid`` adds loss scales out of range."""
    dtype = st.sampled_from(DTYPES)
    return st.builds(
        FP16,
        reduce_dtype=dtype,
        output_dtype=dtype,
        master_weights=st.booleans(),
        init_scale=st.floats(-1.0 if invalid else 1.0, 2.0**16),
        growth_factor=st.floats(0.5 if invalid else 1.125, 4.0),
        backoff_factor=st.floats(0.125, 1.5 if invalid else 0.875),
        growth_interval=st.integers(-1 if invalid else 1, 4000),
    )


OPTIONS = (
    (),
    (c.CompileOption(name="max_autotune", value=False),),
    (c.CompileOption(name="max_fusion_size", value=8),),
)
"""Options that every inductor knows."""


def compiles(blocks: SearchStrategy[c.Wrap] | None, *, invalid: bool = True) -> SearchStrategy[c.Compile]:
    """Every way to compile; ``invalid`` adds modes and backends that are not there. No blocks: whole or not."""
    options = {
        "backend": st.sampled_from(("inductor", "eager", *([""] if invalid else []))),
        "mode": st.sampled_from((*MODES, *(["fastest"] if invalid else []))),
        "fullgraph": st.booleans(),
        "dynamic": st.sampled_from((None, True, False)),
        "recompile_limit": st.sampled_from((None, 4, *([0] if invalid else []))),
        "isolate_recompiles": st.booleans(),
    }
    options["options"] = st.sampled_from((*OPTIONS, *([OPTIONS[1] * 2] if invalid else [])))
    whole = st.just(None) | st.builds(c.CompileModel, **options)
    drawn = whole if blocks is None else whole | st.builds(c.CompileBlocks, blocks=blocks, **options)
    return drawn if invalid else drawn.map(_with_fitting_options)


def _with_fitting_options(drawn: c.Compile) -> c.Compile:
    """Only inductor takes options here, and in the place of a mode."""
    if drawn is None or (drawn.backend == "inductor" and drawn.mode == "default"):
        return drawn
    return evolve(drawn, options=())


def checkpointings(
    blocks: SearchStrategy[c.Wrap], *, invalid: bool = True, compiled: bool = False
) -> SearchStrategy[c.ActivationCheckpointing]:
    """Every way to checkpoint; ``invalid`` adds operators that are none, and numbers of blocks that mean none.

    Blocks that are ``compiled`` offload nothing.
    """
    wrapped = st.builds(
        c.CheckpointBlocks,
        blocks=blocks,
        preserve_rng_state=st.booleans(),
        every=st.integers(0 if invalid else 1, 3),
        keep_ops=st.sampled_from(((), ("aten.mm",), ("aten.addmm.default", *(["mm"] if invalid else [])))),
        offload=st.just(value=False) if compiled else st.booleans(),
    )
    return st.just(None) | wrapped


@cache
def clips(*, invalid: bool = True) -> SearchStrategy[c.Clip]:
    """Every way to clip; ``invalid`` adds limits and norms that are not above 0."""
    number = st.floats(-1.0 if invalid else 0.125, 8.0)
    return st.just(None) | st.builds(c.ClipNorm, number, number) | st.builds(c.ClipValue, number)


@cache
def loader_choices(count: int | None = None, *, split: bool = True) -> SearchStrategy[c.Loaders]:
    """Every way to treat loaders, or so many of them; ``split``: also with batches that are split over the ranks."""
    purposes = st.sampled_from(("training", "evaluation"))
    common = {"purpose": purposes, "to_device": st.booleans(), "ends_window": st.booleans()}
    sharded = st.builds(
        c.ShardLoaders,
        seed=st.integers(0, 3),
        draws=st.sampled_from(["seed", "sampler"]),
        drop_last=st.booleans(),
        split_batches=st.booleans() if split else st.none().map(bool),
        dispatch=st.booleans(),
        whole_batches=st.booleans(),
        **common,
    )
    one = st.builds(c.KeepLoaders, **common) | sharded
    each = st.lists(one, min_size=count or 0, max_size=2 if count is None else count)
    return one | each.map(tuple).map(c.EachLoader)


@cache
def tp_plans(patterns: tuple[str, ...], styles: tuple[str, ...]) -> SearchStrategy[c.TPPlan]:
    """Plans by hand of one or two layers, each with another pattern and with any input and output layout."""
    layouts = st.none() | st.sampled_from(("replicate", "features", "heads", "sequence"))
    layer = st.builds(c.TPLayer, st.sampled_from(patterns), st.sampled_from(styles), layouts, layouts)
    layers = st.lists(layer, min_size=1, max_size=2, unique_by=lambda layer: layer.pattern)
    return st.builds(c.TPPlan, layers.map(tuple))


@cache
def _tp_plans() -> SearchStrategy[c.TensorParallelPlan]:
    patterns = ("layers.*.attn", "layers.?.mlp", "*", "embed", "hed", "layers")
    by_hand = tp_plans(patterns, ("colwise", "rowwise", "sequence", "replicate"))
    return st.just(c.TPPlanFromModel()) | st.just(c.TPPlan(())) | by_hand


def configs() -> SearchStrategy[Config]:
    """Configs of every engine, with every field varied, also to values that rules refuse."""
    size = st.sampled_from((-1, 0, 1, 2, 3, 4, 8))
    return st.builds(
        Config,
        engine=st.one_of(
            st.just(Single()),
            ddps(),
            fsdp2s(_wraps(), st.booleans() | st.integers(-1, 8), casts=st.booleans()),
            fsdp1s(_wraps(), cast_forward_inputs=st.booleans(), cast_root_forward_inputs=st.booleans()),
            st.just(TensorParallel()),
            st.builds(XLA, forked=st.booleans()),
            deepspeeds(),
        ),
        mesh=st.none() | st.builds(Mesh, replicate=size, shard=size, tensor=st.just(1) | size),
        tp_plan=_tp_plans(),
        precision=precisions() | fp8s(fp8_backends()),
        compile=compiles(_wraps()),
        checkpointing=checkpointings(_wraps()),
        weights=weights(),
        intent=st.sampled_from(Intent),
        device=st.sampled_from((None, "cpu", "cuda", "cuda:0", "mps")),
        keep_device_map=st.booleans(),
        backend=st.sampled_from((None, "gloo", "nccl", "cpu:gloo,cuda:nccl", "own")),
        timeout_s=st.sampled_from((600.0, 1.0, 0.0)),
        optimizer=st.none() | optimizer_specs() | several_optimizers(),
        accumulation=st.none() | st.integers(0, 4),
        global_batch=st.sampled_from((None, None, None, 0, 1, 24)),
        average_each=st.booleans(),
        clip=clips(),
        scheduler_ticks=st.integers(-1, 4),
        total_steps=st.none() | st.integers(-1, 4000),
        entry_points=st.sampled_from((None, (), ("generate",), ("forward", "generat"))),
        loaders=loader_choices(),
        overrides=st.lists(st.sampled_from((*_IDS, "no.such-rule")), max_size=2, unique=True).map(tuple),
        origins=origins(),
    )


@cache
def origins() -> SearchStrategy[tuple[c.Origin, ...]]:
    """Return where settings were read from: nowhere, or keys of a file or variables."""
    return st.just(()) | st.lists(_origins(), max_size=3).map(tuple)


@cache
def _origins() -> SearchStrategy[c.Origin]:
    number = st.none() | st.integers(1, 40)
    settings = st.sampled_from(("config.engine", "config.engine.wrap", "config.mesh", "config.precision"))
    keys = st.sampled_from(("mixed_precision", "fsdp_config.fsdp_version", "WORLD_SIZE"))
    sources = st.sampled_from(("accelerate.yaml", "environment"))
    return st.builds(c.Origin, setting=settings, key=keys, source=sources, line=number, column=number)


@cache
def weights() -> SearchStrategy[c.Weights]:
    """Every source of values, also a checkpoint that nobody saw."""
    loaded = st.builds(
        c.LoadWeights, st.sampled_from((PATH, "elsewhere")), rename=st.sampled_from(((), (("(", ""),), (("^", ""),)))
    )
    kept = st.just(None) | st.just(c.BroadcastWeights())
    return kept | st.builds(c.InitWeights, st.integers(-1, 3)) | loaded
