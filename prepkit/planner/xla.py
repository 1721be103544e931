"""Every process holds the whole model on its own XLA device."""

from __future__ import annotations

from prepkit.config import XLA
from prepkit.plan import because
from prepkit.planner import pieces
from prepkit.planner.pieces import Piece, entry_points
from prepkit.resolve.engines import engine_of
from prepkit.resolve.resolved import Resolved
from prepkit.steps import MoveToXLA, ReduceXLAGradients


def plan_xla(resolved: Resolved) -> Piece:
    """Steps of the ``XLA`` engine (behaviour XL-1, XL-2, PR-11). torch_xla starts and joins its processes itself."""
    return (
        pieces.upcast(resolved)
        + move(resolved)  # may replace every parameter: torch cannot always change a tensor's device in place
        + pieces.autocast(resolved)
        + pieces.checkpoint(resolved)
        + pieces.compile_blocks(resolved)
        + entry_points(resolved)  # patched as the forward is by now
        + pieces.compile_model(resolved)
        + pieces.rebind_optimizer(resolved)
        + pieces.create_optimizer(resolved)
        + reduce(resolved)  # watches the optimizer that is there by now
    )


def move(resolved: Resolved) -> Piece:
    """The model to the device of this process."""
    engine = engine_of(resolved.cfg, XLA)
    how = "through torch_xla's wrapper for forked processes" if engine.forked else "each process by itself"
    return because(MoveToXLA(forked=engine.forked), f"the model computes on XLA; {how}", "XL-1", "XL-2", "PR-6")


def reduce(resolved: Resolved) -> Piece:
    """Gradients averaged where there are several processes and an optimizer."""
    facts = resolved.facts
    if facts.env.world_size == 1 or (facts.optimizer is None and not resolved.cfg.optimizer):
        return ()
    return because(ReduceXLAGradients(), f"averages gradients over {facts.env.world_size} processes", "W-5")
