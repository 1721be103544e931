"""One process, one device."""

from __future__ import annotations

from prepkit.config import Config
from prepkit.facts import Facts
from prepkit.planner import fp8, pieces, weights
from prepkit.planner.pieces import Piece


def plan_single(cfg: Config, facts: Facts) -> Piece:
    """Steps of the ``Single`` engine."""
    return (
        weights.check_files(cfg, facts)  # while nothing has been changed
        + fp8.convert(cfg, facts)  # before anything is wrapped around the layers that it replaces
        + weights.move(cfg, facts)  # before the cast, which then happens where the model will live
        + pieces.upcast(cfg, facts)
        + fp8.initialize(cfg, facts)
        + pieces.autocast(cfg, facts)  # inside whatever compiles the model
        + fp8.autocast(cfg, facts)  # around it: what TransformerEngine calls is the bfloat16 forward
        + pieces.checkpoint(cfg, facts)
        + pieces.compile_blocks(cfg, facts)  # a block is compiled as it will run: checkpointed
        + pieces.compile_model(cfg)  # last: it takes in everything above
        + weights.fill(cfg, facts)  # after all that can be refused, in the dtypes that the cast has given
        + pieces.move_state(cfg, facts)
        + pieces.create_optimizer(cfg, facts)
        + pieces.grad_scaler(cfg, facts)
        + pieces.shard_loaders(cfg, facts)
    )
