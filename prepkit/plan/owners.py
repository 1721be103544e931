"""Who counts, clips, ticks, scales and keeps between two optimizer steps."""

from __future__ import annotations

from attrs import frozen

from prepkit.config import Clip


@frozen(kw_only=True)
class Owners:
    """Who counts, clips, ticks and keeps: the same fields for every engine, so that plans can be compared."""

    accumulation: str
    """Who counts micro-batches."""
    accumulation_steps: int
    """Micro-batches per optimizer step."""
    clipping: str
    """Who clips gradients."""
    clip: Clip
    scheduler: str
    """Who steps the scheduler."""
    scheduler_ticks: int
    """Scheduler steps per optimizer step."""
    master_weights: str
    """Where the float32 copy of low-precision trainable parameters lives, or why there is none."""
    loss_scaling: str = "nobody"
    """Who scales the loss, unscales the gradients and skips steps that overflowed."""
