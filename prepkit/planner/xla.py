"""Every process holds the whole model on its own XLA device."""

from __future__ import annotations

from prepkit.config import XLA, Config
from prepkit.facts import Facts
from prepkit.plan import because
from prepkit.planner import pieces
from prepkit.planner.pieces import Piece
from prepkit.steps import MoveToXLA, ReduceXLAGradients


def plan_xla(cfg: Config, facts: Facts) -> Piece:
    """Steps of the ``XLA`` engine (behaviour XL-1, XL-2, PR-11). torch_xla starts and joins its processes itself."""
    return (
        pieces.upcast(cfg, facts)
        + move(cfg)  # may replace every parameter: torch cannot always change a tensor's device in place
        + pieces.autocast(cfg, facts)
        + pieces.checkpoint(cfg, facts)
        + pieces.compile_blocks(cfg, facts)
        + pieces.compile_model(cfg)
        + pieces.rebind_optimizer(facts)
        + pieces.create_optimizer(cfg, facts)
        + reduce(cfg, facts)  # watches the optimizer that is there by now
    )


def move(cfg: Config) -> Piece:
    """The model to the device of this process."""
    assert isinstance(cfg.engine, XLA), "the planner table gives this planner XLA configs only"
    how = "through torch_xla's wrapper for forked processes" if cfg.engine.forked else "each process by itself"
    return because(MoveToXLA(forked=cfg.engine.forked), f"the model computes on XLA; {how}", "XL-1", "XL-2", "PR-6")


def reduce(cfg: Config, facts: Facts) -> Piece:
    """Gradients averaged where there are several processes and an optimizer."""
    if facts.env.world_size == 1 or (facts.optimizer is None and cfg.optimizer is None):
        return ()
    return because(ReduceXLAGradients(), f"averages gradients over {facts.env.world_size} processes", "W-5")
