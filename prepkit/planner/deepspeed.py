"""DeepSpeed holds the model: its config is worked out whole, then one call of ``deepspeed.initialize``."""

from __future__ import annotations

from prepkit.config import FP8, MSAMP, Config, DeepSpeed, Mixed
from prepkit.facts import Facts
from prepkit.plan import because
from prepkit.planner import fp8, pieces
from prepkit.planner.pieces import Piece
from prepkit.resolve.deepspeed.precision import low_dtype
from prepkit.resolve.deepspeed.working import Worked, work_out
from prepkit.resolve.fp8 import kept_wide
from prepkit.steps import CastForward, ConvertOptimizer, InitializeDeepSpeed, MarkLeafModules


def plan_deepspeed(cfg: Config, facts: Facts) -> Piece:
    """Steps of the ``DeepSpeed`` engine (behaviour DS-1 … DS-39). DeepSpeed moves and casts the model itself."""
    worked = work_out(cfg, facts)
    return (
        pieces.start_group(cfg, facts)
        + fp8.convert(cfg, facts)  # before anything is wrapped around the layers that it replaces
        + cast(cfg)  # of the user's model, so that DeepSpeed's hooks see what they expect
        + fp8.autocast(cfg, facts)  # around it, and inside the engine, which calls the module's own forward
        + pieces.checkpoint(cfg, facts)  # inside ZeRO's hooks, so that recomputation gathers again
        + leaves(cfg, facts, worked)  # read when ZeRO-3 puts its hooks in
        + (
            pieces.create_optimizer(cfg, facts) if worked.optimizer == "given" else ()
        )  # before ZeRO takes the parameters
        + (pieces.rebind_optimizer(facts) if fp8.follows(cfg, facts) else ())  # likewise
        + convert(worked)
        + initialise(cfg, facts, worked)  # has no way back: after all that can be refused without it
        + pieces.compile_blocks(cfg, facts)  # compiled code has to see ZeRO's hooks (DS-30)
        + pieces.compile_model(cfg)
        + pieces.shard_loaders(cfg, facts)
    )


def cast(cfg: Config) -> Piece:
    """DeepSpeed casts parameters only; inputs and outputs are cast here, as the other engines do."""
    low = low_dtype(cfg.precision)
    if low is None:
        return ()
    assert isinstance(cfg.precision, Mixed), "the others have no such dtype"
    output = cfg.precision.output_dtype
    step = CastForward(dtype=low, output_dtype=output)
    return because(step, f"the parameters become {low}; returns {output}", "AMP-4", "ST-22")


def leaves(cfg: Config, facts: Facts, worked: Worked) -> Piece:
    """Modules that ZeRO-3 gathers whole."""
    assert isinstance(cfg.engine, DeepSpeed), "the planner table gives this planner DeepSpeed configs only"
    model, names = facts.model, cfg.engine.leaf_modules
    paths = tuple(module.path for module in model.modules if model.classes[module.cls].name in names)
    if worked.stage != 3 or not paths:
        return ()
    return because(MarkLeafModules(paths=paths), "what it calls inside depends on the data", "DS-19", "pain 31")


def convert(worked: Worked) -> Piece:
    """DeepSpeed's CPU form in the place of the optimizer whose state is offloaded."""
    if worked.convert is None:
        return ()
    algorithm, decoupled = worked.convert
    step = ConvertOptimizer(algorithm=algorithm, decoupled=decoupled)
    return because(step, "the state lives and is stepped in host memory", "DS-26", "H-40a", "G-34")


def initialise(cfg: Config, facts: Facts, worked: Worked) -> Piece:
    """The one call, with every value that was worked out as its reason."""
    trained = tuple(param.name for param in facts.model.params if param.requires_grad)
    step = InitializeDeepSpeed(
        device=pieces.device(cfg, facts),
        data_parallel=worked.ranks,
        stage=worked.stage,
        dtype=low_dtype(cfg.precision),
        optimizer=worked.optimizer,
        names=trained if worked.optimizer == "section" else (),
        scheduler=worked.scheduler,
        settings=worked.settings,
        library="msamp" if _is_msamp(cfg) else "deepspeed",
        kept=kept_wide(facts.model) if _is_msamp(cfg) else (),
    )
    rows = ("DS-1", "DP-12") if _is_msamp(cfg) else ()
    reason = "; ".join(worked.notes) or "every value is the user's own"
    return because(step, reason, "DS-13", "DS-23", "DS-25", "DS-29", *rows)


def _is_msamp(cfg: Config) -> bool:
    return isinstance(cfg.precision, FP8) and isinstance(cfg.precision.backend, MSAMP)
