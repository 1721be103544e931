"""Pieces that the engines' plans are sums of. Each gives the steps of one concern, or none."""

from __future__ import annotations

from typing import assert_never

from prepkit.config import (
    BF16,
    FP8,
    FP16,
    FSDP1,
    FSDP2,
    SGD,
    XLA,
    AdamW,
    AsStored,
    CheckpointBlocks,
    CompileBlocks,
    CompileModel,
    Config,
    Intent,
    KeepLoaders,
    NoCheckpointing,
    NoCompile,
    OffloadToCPU,
)
from prepkit.facts import Facts, OptimizerFacts
from prepkit.plan import Planned, because
from prepkit.planner import fp8
from prepkit.resolve.mesh import axes
from prepkit.resolve.modules import select
from prepkit.resolve.precision import masters
from prepkit.steps import (
    Agree,
    AutocastForward,
    CheckpointModules,
    CompileModules,
    CreateGradScaler,
    CreateOptimizer,
    LocalDevice,
    MoveModel,
    OptimizerOption,
    RebindOptimizer,
    RegroupOptimizer,
    ReleaseOptimizer,
    ShardLoader,
    StartProcessGroup,
    UpcastParameters,
)

Piece = tuple[Planned, ...]

COLLECTIVES = {
    "cpu": "gloo",
    "cuda": "nccl",
    "xpu": "xccl",
    "npu": "hccl",
    "hpu": "hccl",
    "mlu": "cncl",
    "sdaa": "tccl",
    "musa": "mccl",
    "neuron": "neuron",
}
"""Device type to the process-group backend that serves it (ST-3, ST-4)."""


def device(cfg: Config, facts: Facts) -> str:
    """Device type to compute on."""
    if isinstance(cfg.engine, XLA):
        return "xla"
    return cfg.device or facts.env.device


def is_spread(facts: Facts) -> bool:
    """Whether a device map has spread the model already, so that it must not be moved (PL-3)."""
    return len(facts.model.device_map) > 1


def backend(cfg: Config, facts: Facts) -> tuple[str, str]:
    """Process-group backend, and why."""
    kind = device(cfg, facts)
    offload = isinstance(cfg.engine, FSDP2) and isinstance(cfg.engine.offload, OffloadToCPU)
    if cfg.backend:
        return cfg.backend, "asked for in config.backend"
    if offload and kind != "cpu":
        return f"cpu:gloo,{kind}:{COLLECTIVES[kind]}", "offloaded gradients are clipped and reduced on the CPU as well"
    return COLLECTIVES[kind], f"the backend for {kind}"


def start_group(cfg: Config, facts: Facts) -> Piece:
    """Process group, then the proof that all ranks hold the same plan."""
    name, reason = backend(cfg, facts)
    group = StartProcessGroup(backend=name, world_size=facts.env.world_size, timeout_s=cfg.timeout_s)
    return because(group, reason, "ST-3", "ST-4", "ST-16") + because(
        Agree(), "ranks that differ are named before anything is changed", "G-30", "G-67", "pain 11"
    )


def upcast(cfg: Config, facts: Facts) -> Piece:
    """Float32 master weights for what is trained in 16 bits."""
    params = masters(cfg, facts)
    if not params:
        return ()
    step = UpcastParameters(names=tuple(p.name for p in params), dtype="float32")
    return because(step, "updates smaller than a 16-bit step would be rounded away", "M2-16", "F1-22", "pain 2")


def move(cfg: Config, facts: Facts) -> Piece:
    """Model to its device, unless a device map has placed it, or its quantised weights, already (PL-3, Q-13)."""
    if is_spread(facts) or (facts.model.quantised and facts.model.device_map):
        return ()
    kind = device(cfg, facts)
    return because(MoveModel(device=LocalDevice(type=kind)), f"the model computes on {kind}", "PL-1")


def autocast(cfg: Config, facts: Facts) -> Piece:
    """Autocast forward for engines that have no mixed precision of their own."""
    match cfg.precision:
        case AsStored():
            return ()
        case BF16(output_dtype=output) | FP16(output_dtype=output) | FP8(output_dtype=output):
            dtype = "float16" if isinstance(cfg.precision, FP16) else "bfloat16"
            step = AutocastForward(device=device(cfg, facts), dtype=dtype, output_dtype=output)
            return because(step, f"computes in {dtype} and returns {output}", "AMP-1", "AMP-4", "AMP-5")
        case _:
            assert_never(cfg.precision)


def checkpoint(cfg: Config, facts: Facts) -> Piece:
    """Activation checkpointing of the chosen blocks."""
    match cfg.checkpointing:
        case NoCheckpointing():
            return ()
        case CheckpointBlocks(blocks=blocks, preserve_rng_state=keep):
            paths = select(blocks, facts.model)
            step = CheckpointModules(paths=paths, preserve_rng_state=keep)
            return (
                because(step, "activations of each block are recomputed in backward", "P2-5", "H-16") if paths else ()
            )
        case _:
            assert_never(cfg.checkpointing)


def compile_blocks(cfg: Config, facts: Facts) -> Piece:
    """Regional compilation: one compiled block serves all of its kind."""
    match cfg.compile:
        case NoCompile() | CompileModel():
            return ()
        case CompileBlocks(blocks=blocks):
            paths = select(blocks, facts.model)
            return _compile(cfg.compile, paths, "equal blocks share one compilation", "H-24") if paths else ()
        case _:
            assert_never(cfg.compile)


def compile_model(cfg: Config) -> Piece:
    """Whole-model compilation."""
    if isinstance(cfg.compile, CompileModel):
        return _compile(cfg.compile, ("",), "asked for in config.compile", "CM-3")
    return ()


def _compile(how: CompileModel | CompileBlocks, paths: tuple[str, ...], reason: str, row: str) -> Piece:
    step = CompileModules(paths=paths, backend=how.backend, mode=how.mode, fullgraph=how.fullgraph, dynamic=how.dynamic)
    return because(step, reason + ", in place, so that names and hooks stay", row)


def _slots(optimizer: OptimizerFacts) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(name or "" for name in group.slots) for group in optimizer.groups)


def release_optimizer(facts: Facts) -> Piece:
    """Optimizer lets go of the parameters that sharding replaces."""
    if facts.optimizer is None:
        return ()
    step = ReleaseOptimizer(slots=_slots(facts.optimizer))
    return because(step, "the old parameters would keep the whole model in memory", "P2-8", "G-57")


def rebind_optimizer(facts: Facts) -> Piece:
    """Optimizer takes the parameters by name, and existing state moves along."""
    if facts.optimizer is None:
        return ()
    state = f" with the state of {len(facts.optimizer.stateful)}" if facts.optimizer.stateful else ""
    step = RebindOptimizer(slots=_slots(facts.optimizer))
    return because(step, f"every slot gets the parameter that now has its name{state}", "P2-13", "P2-14", "G-4", "G-5")


def rebind_flat(cfg: Config, facts: Facts) -> Piece:
    """After FSDP1: by name where the parameters are still there, else by the flat parameter that holds them."""
    if facts.optimizer is None or (isinstance(cfg.engine, FSDP1) and cfg.engine.use_orig_params):
        return rebind_optimizer(facts)
    step = RegroupOptimizer(slots=_slots(facts.optimizer))
    reason = "flat parameters have taken the place of the model's own, and nothing else would train"
    return because(step, reason, "F1-47", "G-1", "pain 1")


def move_state(cfg: Config, facts: Facts) -> Piece:
    """State of an optimizer that has stepped already follows its parameters; fresh ones need nothing but new layers."""
    moved = facts.optimizer is not None and (facts.optimizer.stateful or fp8.follows(cfg, facts))
    return rebind_optimizer(facts) if moved else ()


def create_optimizer(cfg: Config, facts: Facts) -> Piece:
    """The optimizer that the config specifies, over the parameters as they now are."""
    names = tuple(p.name for p in facts.model.params if p.requires_grad)
    match cfg.optimizer:
        case None:
            return ()
        case AdamW(lr=lr, betas=betas, eps=eps, weight_decay=decay):
            options = _options(lr=lr, betas=betas, eps=eps, weight_decay=decay)
            step = CreateOptimizer(algorithm="AdamW", names=names, options=options)
        case SGD(lr=lr, momentum=momentum, weight_decay=decay, nesterov=nesterov):
            options = _options(lr=lr, momentum=momentum, weight_decay=decay, nesterov=nesterov)
            step = CreateOptimizer(algorithm="SGD", names=names, options=options)
        case _:
            assert_never(cfg.optimizer)
    return because(step, "made from the parameters as they now are", "G-1", "pain 1")


def _options(**values: bool | float | tuple[float, ...]) -> tuple[OptimizerOption, ...]:
    return tuple(OptimizerOption(name=name, value=value) for name, value in values.items())


def data_axes(cfg: Config, facts: Facts) -> tuple[str, ...] | None:
    """Axes of the mesh whose ranks read different data; None where all of them do."""
    found = axes(cfg, facts.env) or ()
    over = tuple(axis.name for axis in found if axis.name != "tensor")
    return over if len(over) < len(found) else None


def grad_scaler(cfg: Config, facts: Facts, *, sharded: bool = False) -> Piece:
    """The scaler of a loss whose gradients are float16 on their way; ``sharded`` asks for FSDP1's."""
    if not isinstance(cfg.precision, FP16) or not trains(cfg):
        return ()
    how = cfg.precision
    step = CreateGradScaler(
        device=device(cfg, facts),
        sharded=sharded,
        init_scale=how.init_scale,
        growth_factor=how.growth_factor,
        backoff_factor=how.backoff_factor,
        growth_interval=how.growth_interval,
    )
    return because(step, "small gradients would be 0 in float16", "ST-23", "pain 29")


def shard_loaders(cfg: Config, facts: Facts) -> Piece:
    """Each data-parallel rank reads its own part of the data."""
    if isinstance(cfg.loaders, KeepLoaders) or facts.env.world_size == 1:
        return ()
    seed, drop, over = cfg.loaders.seed, cfg.loaders.drop_last, data_axes(cfg, facts)
    reason = "every rank reads its own samples"
    rows: tuple[str, ...] = ("DL-15",)
    if over is not None:
        reason = "tensor ranks read the same samples, all others their own" if over else "all ranks read the same"
        rows = ("DL-15", "DL-7", "G-47")
    return tuple(
        planned
        for index, loader in enumerate(facts.loaders)
        for planned in because(
            ShardLoader(index=index, shuffle=loader.sampler == "random", seed=seed, drop_last=drop, axes=over),
            reason,
            *rows,
        )
    )


def trains(cfg: Config) -> bool:
    """Whether gradients are wanted."""
    return cfg.intent is Intent.TRAINING
