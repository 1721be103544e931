"""What a driver is told to do: orders as data, carried out one after the other."""

from __future__ import annotations

from typing import NamedTuple


class Average(NamedTuple):
    """Tell the engine whether the next forward and backward average gradients over the ranks."""

    on: bool


class RunBackward(NamedTuple):
    """Run backward on the loss."""

    by_engine: bool
    """The engine divides, scales and runs it."""
    weigh: bool
    """Multiply the loss by its tokens first."""
    divide_by: int
    """Divide it by so many; 1 where the engine does."""
    scale: bool
    """Multiply it by the loss scale."""


class DivideByTokens(NamedTuple):
    """Multiply gradients once, so that sums of weighed losses become the mean over all tokens of the window."""

    micro_batches: int
    """Those of a whole window, by which each loss was divided."""


class Settle(NamedTuple):
    """Free what a forward without a backward has left gathered."""


class AverageWhole(NamedTuple):
    """Average the gradients of what every rank holds whole beside sharded parameters."""


class Look(NamedTuple):
    """Ask the rules that are due before the optimizer acts."""


class Clip(NamedTuple):
    """Unscale and clip the gradients."""


class StepOptimizer(NamedTuple):
    """Step the optimizer."""

    each: tuple[Settle | AverageWhole | Look | Clip, ...] = ()
    """With a closure: carried out each time when it has made gradients anew."""


class StepEngine(NamedTuple):
    """End the micro-batch in an engine that clips, steps and clears by itself."""

    last: bool


class Tick(NamedTuple):
    """Tick the scheduler."""

    times: int


class Recover(NamedTuple):
    """Put the engine to where a forward begins, after a micro-batch that is left out."""

    drop: bool
    """The gradients of the window are thrown away."""
    failed: bool
    """Its backward has raised."""


class Clear(NamedTuple):
    """Set the gradients to None."""


Order = (
    Average
    | RunBackward
    | DivideByTokens
    | Settle
    | AverageWhole
    | Look
    | Clip
    | StepOptimizer
    | StepEngine
    | Tick
    | Recover
    | Clear
)
