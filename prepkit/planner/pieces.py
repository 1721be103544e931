"""Pieces that the engines' plans are sums of. Each gives the steps of one concern, or none."""

from __future__ import annotations

from typing import assert_never

from prepkit.config import (
    FP16,
    FSDP1,
    CheckpointBlocks,
    CompileBlocks,
    CompileModel,
)
from prepkit.config.optimizer import Group, OptimizerSpec, options
from prepkit.config.precision import PRECISIONS
from prepkit.facts import OptimizerFacts
from prepkit.plan import Planned, because
from prepkit.planner import fp8
from prepkit.resolve.created_optimizers import CreatedOptimizer
from prepkit.resolve.engines import engine_of
from prepkit.resolve.entry_points import through
from prepkit.resolve.resolved import Resolved
from prepkit.steps import (
    Agree,
    AutocastForward,
    BackendOption,
    CheckpointModules,
    CompileModules,
    CreateGradScaler,
    CreateOptimizer,
    LocalDevice,
    MakeContiguous,
    MoveModel,
    OptimizerGroup,
    OptimizerOption,
    RebindOptimizer,
    RegisterEntryPoints,
    RegroupOptimizer,
    ReleaseOptimizer,
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


def is_spread(resolved: Resolved) -> bool:
    """Return whether a device map has spread the model already, so that it must not be moved (PL-3)."""
    return len(resolved.facts.model.device_map) > 1


def backend(resolved: Resolved) -> tuple[str, str]:
    """Process-group backend, and why."""
    cfg = resolved.cfg
    kind = resolved.compute_device
    if cfg.backend:
        return cfg.backend, "asked for in config.backend"
    if resolved.offloads and kind != "cpu":
        what = "offloaded gradients are clipped and reduced on the CPU as well"
        if resolved.engine_traits.flattens:
            what = "offloaded shards are saved, and gathered whole, on the CPU as well"
        return f"cpu:gloo,{kind}:{COLLECTIVES[kind]}", what
    return COLLECTIVES[kind], f"the backend for {kind}"


def start_group(resolved: Resolved) -> Piece:
    """Process group, then the proof that all ranks hold the same plan."""
    name, reason = backend(resolved)
    group = StartProcessGroup(backend=name, world_size=resolved.facts.env.world_size, timeout_s=resolved.cfg.timeout_s)
    return because(group, reason, "ST-3", "ST-4", "ST-16") + because(
        Agree(), "ranks that differ are named before anything is changed", "G-30", "G-67", "pain 11"
    )


def upcast(resolved: Resolved) -> Piece:
    """Float32 master weights for what is trained in 16 bits."""
    params = resolved.master_weights
    if not params:
        return ()
    step = UpcastParameters(names=tuple(p.name for p in params), dtype="float32")
    return because(step, "updates smaller than a 16-bit step would be rounded away", "M2-16", "F1-22", "pain 2")


def contiguous(resolved: Resolved) -> Piece:
    """Return what torch and DeepSpeed shard and send lies in the order of its indices; a transposed weight does not."""
    whole = set(resolved.unsharded_params)
    names = tuple(name for name in resolved.facts.model.strided if name not in whole)
    if not names:
        return ()
    reason = f"{type(resolved.cfg.engine).__name__} takes no other order"
    return because(MakeContiguous(names=names), reason, "P2-8", "DS-19")


def move(resolved: Resolved) -> Piece:
    """Model to its device, unless a device map has placed it, or its quantised weights, already (PL-3, Q-13)."""
    facts = resolved.facts
    if is_spread(resolved) or (facts.model.quantised and facts.model.device_map):
        return ()
    kind = resolved.compute_device
    return because(MoveModel(device=LocalDevice(type=kind)), f"the model computes on {kind}", "PL-1")


def autocast(resolved: Resolved) -> Piece:
    """Autocast forward for engines that have no mixed precision of their own."""
    dtypes = resolved.compute_dtypes
    if dtypes is None:
        return ()
    step = AutocastForward(device=resolved.compute_device, dtype=dtypes.param, output_dtype=dtypes.output)
    return because(step, f"computes in {dtypes.param} and returns {dtypes.output}", "AMP-1", "AMP-4", "AMP-5")


def loss_inside(resolved: Resolved) -> str:
    """In what a forward computes a loss, where parameters are cast and no autocast does losses in float32 (G-29)."""
    dtypes = resolved.compute_dtypes
    if dtypes is None or dtypes.param == dtypes.output or not resolved.trains:
        return ""
    return f"; a loss that forward computes is in {dtypes.param}, unless under torch.autocast"


def checkpoint(resolved: Resolved) -> Piece:
    """Activation checkpointing of the chosen blocks."""
    match resolved.cfg.checkpointing:
        case None:
            return ()
        case CheckpointBlocks() as how:
            return _checkpoint(how, resolved.checkpointed)
        case _:
            assert_never(resolved.cfg.checkpointing)


def _checkpoint(how: CheckpointBlocks, paths: tuple[str, ...]) -> Piece:
    if not paths:
        return ()
    reason = "activations of each block are recomputed in backward"
    source = ["P2-5", "H-16"]
    if how.offload:
        reason += ", from inputs that leave the device"
        source.append("K-F18")
    step = CheckpointModules(
        paths=paths, preserve_rng_state=how.preserve_rng_state, keep_ops=how.keep_ops, offload=how.offload
    )
    return because(step, reason, *source)


def compile_blocks(resolved: Resolved) -> Piece:
    """Regional compilation: one compiled block serves all of its kind."""
    cfg = resolved.cfg
    match cfg.compile:
        case None | CompileModel():
            return ()
        case CompileBlocks(blocks=blocks):
            paths = resolved.selected[blocks]
            return _compile(cfg.compile, paths, "equal blocks share one compilation", "H-24") if paths else ()
        case _:
            assert_never(cfg.compile)


def compile_model(resolved: Resolved) -> Piece:
    """Whole-model compilation."""
    if isinstance(resolved.cfg.compile, CompileModel):
        return _compile(resolved.cfg.compile, ("",), "asked for in config.compile", "CM-3")
    return ()


def _compile(how: CompileModel | CompileBlocks, paths: tuple[str, ...], reason: str, row: str) -> Piece:
    step = CompileModules(
        paths=paths,
        backend=how.backend,
        mode=how.mode,
        fullgraph=how.fullgraph,
        dynamic=how.dynamic,
        options=tuple(BackendOption(name=option.name, value=option.value) for option in how.options),
        recompile_limit=how.recompile_limit,
        isolate_recompiles=how.isolate_recompiles,
    )
    rows = (row, "K-DY5") if how.options else (row,)
    return because(step, reason + ", in place, so that names and hooks stay", *rows)


def _slots(optimizer: OptimizerFacts) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(name or "" for name in group.slots) for group in optimizer.groups)


def release_optimizer(resolved: Resolved) -> Piece:
    """Optimizer lets go of the parameters that sharding replaces."""
    if resolved.facts.optimizer is None:
        return ()
    step = ReleaseOptimizer(slots=_slots(resolved.facts.optimizer))
    return because(step, "the old parameters would keep the whole model in memory", "P2-8", "G-57")


def rebind_optimizer(resolved: Resolved) -> Piece:
    """Optimizer takes the parameters by name, and existing state moves along."""
    facts = resolved.facts
    if facts.optimizer is None:
        return ()
    state = f" with the state of {len(facts.optimizer.stateful)}" if facts.optimizer.stateful else ""
    step = RebindOptimizer(slots=_slots(facts.optimizer))
    return because(step, f"every slot gets the parameter that now has its name{state}", "P2-13", "P2-14", "G-4", "G-5")


def rebind_flat(resolved: Resolved) -> Piece:
    """After FSDP1: by name where the parameters are still there, else by the flat parameter that holds them."""
    engine, facts = engine_of(resolved.cfg, FSDP1), resolved.facts
    if facts.optimizer is None or engine.use_orig_params:
        return rebind_optimizer(resolved)
    step = RegroupOptimizer(slots=_slots(facts.optimizer))
    reason = "flat parameters have taken the place of the model's own, and nothing else would train"
    return because(step, reason, "F1-47", "G-1", "pain 1")


def move_state(resolved: Resolved) -> Piece:
    """State of an optimizer that has stepped already follows its parameters; fresh ones need nothing but new layers."""
    moved = resolved.facts.optimizer is not None and (resolved.facts.optimizer.stateful or fp8.follows(resolved))
    return rebind_optimizer(resolved) if moved else ()


def create_optimizer(resolved: Resolved) -> Piece:
    """The optimizers that the config specifies, over the parameters as they now are."""
    steps = tuple(_create(index, made) for index, made in enumerate(resolved.created_optimizers))
    return tuple(
        planned
        for step in steps
        for planned in because(step, "made from the parameters as they now are", "G-1", "pain 1")
    )


def _create(index: int, made: CreatedOptimizer) -> CreateOptimizer:
    groups = ((group.names, group.said) for group in made.groups if group.names)
    return CreateOptimizer(
        algorithm=type(made.spec).__name__,
        names=made.rest,
        options=_options(made.spec),
        groups=tuple(OptimizerGroup(names=names, options=_options(said)) for names, said in groups),
        index=index,
    )


def _options(of: OptimizerSpec | Group) -> tuple[OptimizerOption, ...]:
    return tuple(OptimizerOption(name=name, value=value) for name, value in options(of).items())


def grad_scaler(resolved: Resolved, *, sharded: bool = False) -> Piece:
    """The scaler of a loss whose gradients are float16 on their way; ``sharded`` asks for FSDP1's."""
    how = resolved.cfg.precision
    if not PRECISIONS[type(how)].scales_loss or not resolved.trains:
        return ()
    assert isinstance(how, FP16), "of the precisions that scale the loss only FP16 says how"
    step = CreateGradScaler(
        device=resolved.compute_device,
        sharded=sharded,
        init_scale=how.init_scale,
        growth_factor=how.growth_factor,
        backoff_factor=how.backoff_factor,
        growth_interval=how.growth_interval,
    )
    return because(step, "small gradients would be 0 in float16", "ST-23", "pain 29")


# --- entry points ----------------------------------------------------------------------------------------------------


_REASONS = {
    "units": "each call gathers the root's parameters, as forward does",
    "wrapper": "each call runs inside the wrapper's forward, which averages or gathers",
    "forward": "each call runs in the precision of forward",
}


def entry_points(resolved: Resolved) -> Piece:
    """None where no method is named or well-known, or each works as it stands."""
    names, way = resolved.entry_points, through(resolved.cfg)
    if not names or way is None:
        return ()
    step = RegisterEntryPoints(names=names, through=way, in_step=_gathers_in_step(resolved))
    return because(step, _REASONS[way], "torch register_fsdp_forward_method")


def _gathers_in_step(resolved: Resolved) -> bool:
    """Return whether ranks gather parameters together in every forward, so that all have to call it equally often."""
    return resolved.engine_traits.has_units or resolved.zero_stage == 3
