"""Which library does what between two optimizer steps: each of these things is done once, by the one named here."""

from __future__ import annotations

from attrs import frozen

from prepkit.config import Clip


@frozen(kw_only=True)
class Owners:
    """``prepkit``, ``DeepSpeed`` or ``nobody`` for each duty; the same fields for every engine, so plans compare."""

    accumulation: str
    """Who counts micro-batches, and so decides which one ends with an optimizer step."""
    accumulation_steps: int
    """Micro-batches per optimizer step."""
    clipping: str
    """Who clips gradients just before the optimizer steps."""
    clip: Clip
    """How they are clipped."""
    scheduler: str
    """Who steps the learning-rate scheduler."""
    scheduler_ticks: int
    """Scheduler steps per optimizer step."""
    master_weights: str
    """Where the float32 copy of low-precision trainable parameters lives, or why there is none."""
    loss_scaling: str = "nobody"
    """Who scales the loss, unscales the gradients and skips steps that overflowed."""
    global_batch: int | None = None
    """Samples per optimizer step over all data ranks; None: nobody says how many a rank reads at once."""
