"""One process, one device."""

from __future__ import annotations

from prepkit.planner import fp8, pieces, weights
from prepkit.planner.loaders import prepare_loaders
from prepkit.planner.pieces import Piece, entry_points
from prepkit.resolve.resolved import Resolved


def plan_single(resolved: Resolved) -> Piece:
    """Steps of the ``Single`` engine."""
    return (
        weights.check_files(resolved)  # while nothing has been changed
        + fp8.convert(resolved)  # before anything is wrapped around the layers that it replaces
        + weights.move(resolved)  # before the cast, which then happens where the model will live
        + pieces.upcast(resolved)
        + fp8.initialize(resolved)
        + pieces.autocast(resolved)  # inside whatever compiles the model
        + fp8.autocast(resolved)  # around it: what TransformerEngine calls is the bfloat16 forward
        + pieces.checkpoint(resolved)
        + pieces.compile_blocks(resolved)  # a block is compiled as it will run: checkpointed
        + entry_points(resolved)  # patched as the forward is by now
        + pieces.compile_model(resolved)  # last: it takes in everything above
        + weights.fill(resolved)  # after all that can be refused, in the dtypes that the cast has given
        + pieces.move_state(resolved)
        + pieces.create_optimizer(resolved)
        + pieces.grad_scaler(resolved)
        + prepare_loaders(resolved)
    )
