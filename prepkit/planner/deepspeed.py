"""DeepSpeed holds the model: its config is worked out whole, then one call of ``deepspeed.initialize``."""

from __future__ import annotations

from prepkit.config import FP8, MSAMP, DeepSpeed
from prepkit.plan import because
from prepkit.planner import fp8, pieces, weights
from prepkit.planner.pieces import Piece, entry_points
from prepkit.planner.weights import prepare_loaders
from prepkit.resolve.deepspeed.working import WorkingConfig
from prepkit.resolve.engines import engine_of
from prepkit.resolve.fp8 import kept_wide
from prepkit.resolve.resolved import Resolved
from prepkit.steps import (
    CastForward,
    ConvertOptimizer,
    InitializeDeepSpeed,
    LocalDevice,
    MarkLeafModules,
    PartitionParameters,
)


def plan_deepspeed(resolved: Resolved) -> Piece:
    """Steps of the ``DeepSpeed`` engine (behaviour DS-1 … DS-39). DeepSpeed moves and casts the model itself."""
    config = resolved.deepspeed
    return (
        pieces.start_group(resolved)
        + weights.check_files(resolved)  # while nothing has been changed
        + stash(resolved, config)  # before what rank 0 alone has is divided
        + pieces.contiguous(resolved)  # DeepSpeed sends the model as bytes
        + fp8.convert(resolved)  # before anything is wrapped around the layers that it replaces
        + cast(resolved)  # of the user's model, so that DeepSpeed's hooks see what they expect
        + fp8.autocast(resolved)  # around it, and inside the engine, which calls the module's own forward
        + pieces.checkpoint(resolved)  # inside ZeRO's hooks, so that recomputation gathers again
        + leaves(resolved, config)  # read when ZeRO-3 puts its hooks in
        + partition(resolved, config)  # what has no values; has no way back
        + weights.fill(resolved)  # what DeepSpeed is given: at ZeRO-3 parts, else the whole on every rank
        + (pieces.create_optimizer(resolved) if config.optimizer == "given" else ())  # before ZeRO takes the parameters
        + (pieces.rebind_optimizer(resolved) if fp8.follows(resolved) else ())  # likewise
        + convert(config)
        + initialize(resolved, config)  # has no way back: after all that can be refused without it
        + pieces.compile_blocks(resolved)  # compiled code has to see ZeRO's hooks (DS-30)
        + pieces.compile_model(resolved)
        + entry_points(resolved)  # of the engine
        + prepare_loaders(resolved)
    )


def cast(resolved: Resolved) -> Piece:
    """DeepSpeed casts parameters only; inputs and outputs are cast here, as the other engines do."""
    dtypes = resolved.compute_dtypes
    if dtypes is None:
        return ()
    step = CastForward(dtype=dtypes.param, output_dtype=dtypes.output)
    reason = f"the parameters become {dtypes.param}; returns {dtypes.output}{pieces.loss_inside(resolved)}"
    return because(step, reason, "AMP-4", "ST-22")


def leaves(resolved: Resolved, config: WorkingConfig) -> Piece:
    """Modules that ZeRO-3 gathers whole."""
    model, names = resolved.facts.model, engine_of(resolved.cfg, DeepSpeed).leaf_modules
    paths = tuple(module.path for module in model.modules if model.classes[module.cls].name in names)
    if config.stage != 3 or not paths:
        return ()
    return because(MarkLeafModules(paths=paths), "what it calls inside depends on the data", "DS-19", "pain 31")


def stash(resolved: Resolved, config: WorkingConfig) -> Piece:
    """At ZeRO-3 no rank holds the whole on its device; below it rank 0 sends from where its values are."""
    return weights.stash(resolved) if config.stage == 3 else ()


def partition(resolved: Resolved, config: WorkingConfig) -> Piece:
    """ZeRO-3's parts, for values that come later. Where the model has its values, DeepSpeed divides it by itself."""
    if config.stage != 3 or not weights.gives_values(resolved):
        return ()
    step = PartitionParameters(device=LocalDevice(type=resolved.compute_device), settings=config.settings)
    reason = "each rank holds its parts and one whole parameter at a time, and never the whole model"
    return because(step, reason, "DP-10", "M2-8", "M2-14", "pain 17")


def convert(config: WorkingConfig) -> Piece:
    """DeepSpeed's CPU form in the place of the optimizer whose state is offloaded."""
    if config.convert is None:
        return ()
    algorithm, decoupled = config.convert
    step = ConvertOptimizer(algorithm=algorithm, decoupled=decoupled)
    return because(step, "the state lives and is stepped in host memory", "DS-26", "H-40a", "G-34")


def initialize(resolved: Resolved, config: WorkingConfig) -> Piece:
    """The one call, with every value that was worked out as its reason."""
    trained = tuple(param.name for param in resolved.facts.model.params if param.requires_grad)
    step = InitializeDeepSpeed(
        device=resolved.compute_device,
        data_parallel=config.ranks,
        stage=config.stage,
        dtype=resolved.compute_dtypes.param if resolved.compute_dtypes else None,
        optimizer=config.optimizer,
        names=trained if config.optimizer == "section" else (),
        scheduler=config.scheduler,
        settings=config.settings,
        filled=weights.gives_values(resolved),
        library="msamp" if _is_msamp(resolved) else "deepspeed",
        kept=kept_wide(resolved.facts.model) if _is_msamp(resolved) else (),
    )
    rows = ("DS-1", "DP-12") if _is_msamp(resolved) else ()
    reason = "; ".join(config.notes) or "every value is the user's own"
    return because(step, reason, "DS-13", "DS-23", "DS-25", "DS-29", *rows)


def _is_msamp(resolved: Resolved) -> bool:
    return isinstance(resolved.cfg.precision, FP8) and isinstance(resolved.cfg.precision.backend, MSAMP)
